// The threads of a block whose kernel has barriers are fibres: each has a stack, and runs from barrier to barrier on
// the worker's thread. So the threads of a warp do not run in step, and code that relies on it without a barrier goes
// wrong, as it may on a GPU of compute capability 7.0 or above.
#include "fibres.h"

#include <sys/mman.h>

#if !defined(__x86_64__)
#error "switch_stack is written for x86-64"
#endif

// Saves the registers that a call must keep on the current stack, and its address in *from, and continues on the stack
// that was saved as `to`.
extern "C" void standin_switch_stack(void **from, void *to);
__asm__(R"(
.text
.globl standin_switch_stack
.hidden standin_switch_stack
.type standin_switch_stack,@function
standin_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size standin_switch_stack,.-standin_switch_stack
)");

namespace standin {

static const size_t STACK = 64 * 1024;
static const int SAVED_REGISTERS = 6;

enum { FINISHED = 0, READY = 4 };  // besides SYNC_BLOCK and SYNC_WARP, which wait

struct Fibre {
  void *stack_pointer;
  int state;
};

// The fibres of one worker. The stacks are kept from block to block.
struct Fibres {
  std::vector<Fibre> fibres;
  std::vector<unsigned> order;
  char *stacks = nullptr;
  void *scheduler = nullptr;  // the stack pointer of run_fibres
  unsigned current = 0;
  const KernelCall *call = nullptr;

  void allocate() {
    if (stacks) return;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK;
    stacks = (char *)mmap(nullptr, STACK * MAX_THREADS, PROT_READ | PROT_WRITE, flags, -1, 0);
    fibres.resize(MAX_THREADS);
  }
  ~Fibres() {
    if (stacks) munmap(stacks, STACK * MAX_THREADS);
  }
};
static thread_local Fibres *mine = nullptr;

static void fibre_main() {
  mine->call->kernel->run_thread(mine->call->parameters);
  mine->fibres[mine->current].state = FINISHED;
  void *unused;
  standin_switch_stack(&unused, mine->scheduler);
  abort();
}

void barrier(int kind) {
  Fibres &self = *mine;
  Fibre &fibre = self.fibres[self.current];
  fibre.state = kind;
  standin_switch_stack(&fibre.stack_pointer, self.scheduler);
}

// A stack that looks as if standin_switch_stack had left it at the start of fibre_main.
static void prepare(Fibres &self, unsigned index) {
  // The tops are at different offsets: at the same one, all of them would share one set of the processor's cache.
  char *top = self.stacks + STACK * (index + 1) - (index * 320) % 8192;
  void **stack = (void **)((uintptr_t)top & ~(uintptr_t)63);
  *--stack = nullptr;  // fibre_main has no caller
  *--stack = (void *)fibre_main;
  for (int i = 0; i < SAVED_REGISTERS; i++) *--stack = nullptr;
  self.fibres[index] = Fibre{stack, READY};
}

static void set_order(std::vector<unsigned> &order, unsigned threads) {
  if (order.size() == threads) return;
  order.resize(threads);
  for (unsigned i = 0; i < threads; i++) order[i] = settings.order == Order::reverse ? threads - 1 - i : i;
}

static void shuffle(std::vector<unsigned> &order) {
  for (size_t i = order.size() - 1; i > 0; i--) std::swap(order[i], order[worker->random() % (i + 1)]);
}

void run_fibres(const KernelCall &call) {
  const Dim3 size = call.block;
  const unsigned threads = size.x * size.y * size.z;
  static thread_local Fibres of_this_thread;
  Fibres &self = of_this_thread;
  mine = &self;
  self.allocate();
  self.call = &call;
  set_order(self.order, threads);
  for (unsigned i = 0; i < threads; i++) prepare(self, i);
  for (unsigned unfinished = threads; unfinished;) {
    if (settings.order == Order::shuffle) shuffle(self.order);
    for (unsigned index : self.order) {
      Fibre &fibre = self.fibres[index];
      if (fibre.state != READY) continue;
      *call.module->thread_index = Dim3{index % size.x, index / size.x % size.y, index / size.x / size.y};
      self.current = index;
      standin_switch_stack(&self.scheduler, fibre.stack_pointer);
      if (fibre.state == FINISHED) unfinished--;
    }
    // All threads wait or have finished. Warps go on first, and the block when no warp waits.
    int released = SYNC_BLOCK;
    for (unsigned i = 0; i < threads; i++)
      if (self.fibres[i].state == SYNC_WARP) released = SYNC_WARP;
    for (unsigned i = 0; i < threads; i++)
      if (self.fibres[i].state == released) self.fibres[i].state = READY;
  }
}

}  // namespace standin
