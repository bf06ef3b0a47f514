// The part of NVML that tells who uses the cards: their addresses, processes and displays. NVML counts cards by their PCI
// buses, and knows nothing of CUDA_VISIBLE_DEVICES. Memory and utilisation are functions that an old driver lacks.
#include "common.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include <unistd.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };

// As in nvml.h.
struct Pci {
  char legacy[16];
  unsigned domain, bus, device, id, subsystem;
  char address[32];
};
struct Process {
  unsigned pid;
  unsigned long long memory;
  unsigned gpu_instance, compute_instance;
};

struct Card {
  int bus;
  bool display;
  std::vector<unsigned> processes;
};
typedef Card *Handle;
static std::vector<Card> cards;

// What a setting has for a device, in a list that is separated by semicolons.
static std::string entry(const char *name, int device) {
  const char *value = getenv(name);
  for (; value && device; device--)
    if ((value = strchr(value, ';'))) value++;
  return value ? std::string(value, strcspn(value, ";")) : "";
}

API int nvmlInitWithFlags(unsigned) {
  cards.clear();
  const char *devices = getenv("CUDA_ON_CPU_DEVICES");
  for (int i = 0; i < (devices ? atoi(devices) : 2); i++) {
    const std::string bus = entry("CUDA_ON_CPU_BUSES", i), processes = entry("CUDA_ON_CPU_PROCESSES", i);
    Card card{bus.empty() ? i + 1 : atoi(bus.c_str()), atoi(entry("CUDA_ON_CPU_DISPLAY", i).c_str()) != 0, {}};
    for (const char *text = processes.c_str(); *text; text += strspn(text, ", ")) {
      char *end;
      card.processes.push_back(strtoul(text, &end, 10));
      text = end == text ? "" : end;
    }
    cards.push_back(card);
  }
  std::sort(cards.begin(), cards.end(), [](const Card &a, const Card &b) { return a.bus < b.bus; });
  return SUCCESS;
}

API int nvmlShutdown() {
  return cards.empty() ? UNINITIALIZED : SUCCESS;
}

API const char *nvmlErrorString(int error) { return error ? "an error of the stand-in for NVML" : "Success"; }

API int nvmlDeviceGetCount_v2(unsigned *count) {
  *count = cards.size();
  return SUCCESS;
}

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, Handle *handle) {
  if (index >= cards.size()) return INVALID_ARGUMENT;
  *handle = &cards[index];
  return SUCCESS;
}

API int nvmlDeviceGetHandleByPciBusId_v2(const char *address, Handle *handle) {
  const char *hangs = getenv("CUDA_ON_CPU_NVML_HANG");
  while (hangs && atoi(hangs)) pause();
  unsigned domain, bus;
  if (sscanf(address, "%x:%x:", &domain, &bus) != 2) return INVALID_ARGUMENT;
  for (Card &card : cards)
    if (card.bus == (int)bus) return *handle = &card, SUCCESS;
  return NOT_FOUND;
}

API int nvmlDeviceGetPciInfo_v3(Handle card, Pci *pci) {
  *pci = Pci();
  pci->bus = card->bus;
  snprintf(pci->legacy, sizeof pci->legacy, "0000:%02X:00.0", card->bus);
  snprintf(pci->address, sizeof pci->address, "00000000:%02X:00.0", card->bus);
  return SUCCESS;
}

API int nvmlDeviceGetComputeRunningProcesses_v3(Handle card, unsigned *count, Process *processes) {
  const unsigned room = *count;
  *count = card->processes.size();
  if (room < *count) return INSUFFICIENT_SIZE;
  for (unsigned i = 0; i < *count; i++) processes[i] = {card->processes[i], 1 << 20, ~0u, ~0u};
  return SUCCESS;
}

API int nvmlDeviceGetDisplayActive(Handle card, int *active) {
  *active = card->display;
  return SUCCESS;
}
