// Faults: a kernel that touches memory that it must not touch gives an error of CUDA instead of the end of the process.
#include "streams.h"

#include <cstring>

namespace standin {

static const int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
static struct sigaction previous[sizeof SIGNALS / sizeof *SIGNALS];

// A fault on a worker jumps back into run_guarded; any other one goes to the handler that was there before.
static void on_fault(int signal_number, siginfo_t *info, void *machine_context) {
  if (worker && worker->guarded) {
    worker->signal = signal_number;
    worker->address = info->si_addr;
    worker->guarded = 0;
    siglongjmp(worker->way_out, 1);
  }
  Device *device = signal_number == SIGSEGV ? owner(info->si_addr) : nullptr;
  if (device)
    say("the host touched %p, memory of device %d: on a GPU this is a segmentation fault", info->si_addr,
        device->ordinal);
  for (size_t i = 0; i < sizeof SIGNALS / sizeof *SIGNALS; i++) {
    if (SIGNALS[i] != signal_number) continue;
    struct sigaction &old = previous[i];
    if (old.sa_flags & SA_SIGINFO && old.sa_sigaction) {
      old.sa_sigaction(signal_number, info, machine_context);
    } else if (old.sa_handler != SIG_DFL && old.sa_handler != SIG_IGN) {
      old.sa_handler(signal_number);
    } else {
      signal(signal_number, SIG_DFL);
      raise(signal_number);
    }
  }
}

// May be called again: other handlers, such as faulthandler's, may have come in the meantime.
void install_fault_handlers() {
  for (size_t i = 0; i < sizeof SIGNALS / sizeof *SIGNALS; i++) {
    struct sigaction now, ours;
    memset(&ours, 0, sizeof ours);
    ours.sa_sigaction = on_fault;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(SIGNALS[i], nullptr, &now);
    if (now.sa_flags & SA_SIGINFO && now.sa_sigaction == on_fault) continue;
    previous[i] = now;
    sigaction(SIGNALS[i], &ours, nullptr);
  }
}

static int report(const char *what) {
  Device *device = worker->stream->device, *other = owner(worker->address);
  if (worker->signal == SIGFPE) {
    say("device %d: %s divides an integer by zero; a GPU would go on with an undefined number", device->ordinal, what);
    return LAUNCH_FAILED;
  }
  if (worker->signal == SIGILL) {
    say("device %d: %s called __trap", device->ordinal, what);
    return LAUNCH_FAILED;
  }
  say("device %d: illegal address %p (%s) in %s", device->ordinal, worker->address,
      !other ? "no device's memory" : other == device ? "freed or out of bounds" : "another device's memory", what);
  return ILLEGAL_ADDRESS;
}

int run_guarded(const char *what, const std::function<int()> &run) {
  if (sigsetjmp(worker->way_out, 1) == 0) {
    worker->guarded = 1;
    int result = run();
    worker->guarded = 0;
    return result;
  }
  worker->stream->device->allow_all();  // the kernel took all access away for the handler
  return report(what);
}

}  // namespace standin
