#include "runtime.h"

#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <vector>

namespace emulate {

Size thread_index, block_index, block_size, grid_size;
unsigned lane;
char* dynamic_shared;

namespace {

constexpr size_t STACK = 256 * 1024, GUARD = 4096, FENCE = 1 << 20;
constexpr unsigned MOST_THREADS = 1024, BARRIERS = 16;
constexpr unsigned STATIC_AT = 1 << 20, DYNAMIC_AT = 1 << 24;  // shared addresses, apart from each other and from null

struct Copy {
  char* to;
  const char* from;
  unsigned bytes, given;
  unsigned group;
};

struct Thread {
  jmp_buf state;
  bool started, done;
  const unsigned* generation;  // it waits until this changes
  unsigned seen;
  const char* waits_at;
  std::vector<Copy> copies;
  unsigned groups;  // committed
};

struct Barrier {
  unsigned arrived, expected, generation;
};

Thread threads[MOST_THREADS];
Warp warps[MOST_THREADS / WARP];
Barrier barriers[BARRIERS];
char* stacks;
jmp_buf scheduler;
sigjmp_buf failure;
char message[1024];
void* faulted;
unsigned current, live;
Body body;
void** arguments;
const Launch* running;

void yield() {
  if (!_setjmp(threads[current].state)) _longjmp(scheduler, 1);
}

void wait_for(const unsigned* generation, const char* where) {
  Thread& thread = threads[current];
  thread.generation = generation, thread.seen = *generation, thread.waits_at = where;
  yield();
}

bool complete(const Barrier& b) { return b.arrived > 0 && b.arrived >= (b.expected ? b.expected : live); }

void release(Barrier& b) {
  b.arrived = 0;
  ++b.generation;
}

void leave() {
  Warp& warp = my_warp();
  warp.live &= ~(1u << lane);
  --live;
  threads[current].done = true;
  for (Barrier& b : barriers)
    if (complete(b)) release(b);
  if (warp.arrived) fail("returns, and its warp waits for it at %s", warp.instruction);
}

// A fiber lives on: it runs its thread of one block after the other.
void fiber() {
  for (;;) {
    body(arguments);
    leave();
    yield();
  }
}

void begin(unsigned index) {
  ucontext_t context, back;
  getcontext(&context);
  context.uc_stack.ss_sp = stacks + index * (STACK + GUARD) + GUARD;
  context.uc_stack.ss_size = STACK;
  context.uc_link = nullptr;
  makecontext(&context, fiber, 0);
  swapcontext(&back, &context);
}

void run_thread(unsigned index) {
  Thread& thread = threads[index];
  current = index, lane = index % WARP, thread_index = {index, 0, 0};
  thread.generation = nullptr;
  if (_setjmp(scheduler)) return;
  if (thread.started) _longjmp(thread.state, 1);
  thread.started = true;
  begin(index);
}

bool ready(const Thread& thread) { return !thread.done && (!thread.generation || *thread.generation != thread.seen); }

[[noreturn]] void stuck(unsigned count) {
  unsigned waiting = 0;
  const char* where = "";
  for (unsigned i = 0; i < count; ++i)
    if (!threads[i].done) ++waiting, where = threads[i].waits_at;
  fail("%u of %u threads wait for ever, the last of them at %s", waiting, count, where);
}

void run_block(unsigned count) {
  const bool reverse = running->order & 1;
  const unsigned warp_count = (count + WARP - 1) / WARP;
  for (unsigned w = 0; w < warp_count; ++w) {
    const unsigned lanes = count - w * WARP < WARP ? count - w * WARP : WARP;
    warps[w] = {};
    warps[w].live = warps[w].all = lanes == WARP ? ~0u : (1u << lanes) - 1;
  }
  memset(barriers, 0, sizeof barriers);
  for (unsigned i = 0; i < count; ++i) {
    threads[i].done = false, threads[i].generation = nullptr, threads[i].groups = 0;
    threads[i].copies.clear();
  }
  memset(dynamic_shared, 0xff, running->dynamic_bytes);
  memset(running->static_shared, 0xff, running->static_bytes);
  live = count;
  while (live) {
    bool moved = false;
    for (unsigned w = 0; w < warp_count; ++w) {
      const unsigned warp = reverse ? warp_count - 1 - w : w;
      bool again = true;
      while (again) {
        again = false;
        for (unsigned l = 0; l < WARP; ++l) {
          const unsigned index = warp * WARP + (reverse ? WARP - 1 - l : l);
          if (index < count && ready(threads[index])) run_thread(index), again = moved = true;
        }
      }
    }
    if (!moved) stuck(count);
  }
}

void fault(int, siginfo_t* info, void*) {
  faulted = info->si_addr;
  snprintf(message, sizeof message, "access to %p by thread %u of block (%u, %u)", info->si_addr, current, block_index.x, block_index.y);
  siglongjmp(failure, 1);
}

}  // namespace

Warp& my_warp() { return warps[current / WARP]; }

void fail(const char* format, ...) {
  const int used = snprintf(message, sizeof message, "thread %u of block (%u, %u): ", current, block_index.x, block_index.y);
  va_list list;
  va_start(list, format);
  vsnprintf(message + used, sizeof message - used, format, list);
  va_end(list);
  siglongjmp(failure, 1);
}

const unsigned* meet(const char* instruction, Meeting meeting) {
  Warp& warp = my_warp();
  if (warp.live != warp.all) fail("%s waits for lanes %08x of its warp, which have returned", instruction, warp.all & ~warp.live);
  if (!warp.arrived)
    warp.instruction = instruction;
  else if (strcmp(warp.instruction, instruction))
    fail("a lane is at %s and others of its warp wait at %s", instruction, warp.instruction);
  warp.arrived |= 1u << lane;
  if (warp.arrived != warp.live) {
    wait_for(&warp.generation, instruction);
  } else {
    meeting(warp);
    warp.arrived = 0;
    ++warp.generation;
  }
  return warp.out[lane];
}

void barrier(unsigned number, unsigned count) {
  if (number >= BARRIERS || count % WARP) fail("no barrier %u for %u threads", number, count);
  Barrier& b = barriers[number];
  if (!b.arrived)
    b.expected = count;
  else if (b.expected != count)
    fail("barrier %u is for %u threads here and for %u elsewhere", number, count, b.expected);
  ++b.arrived;
  if (complete(b))
    release(b);
  else
    wait_for(&b.generation, "a barrier");
}

unsigned shared_address(const void* pointer) {
  const char* const at = static_cast<const char*>(pointer);
  if (at >= dynamic_shared && at <= dynamic_shared + running->dynamic_bytes) return DYNAMIC_AT + unsigned(at - dynamic_shared);
  if (at >= running->static_shared && at <= running->static_shared + running->static_bytes)
    return STATIC_AT + unsigned(at - running->static_shared);
  fail("an address outside shared memory is taken as a shared one");
}

char* shared_pointer(unsigned address, unsigned bytes) {
  const size_t end = size_t(address) + bytes;
  char* at = nullptr;
  if (address >= DYNAMIC_AT && end <= DYNAMIC_AT + size_t(running->dynamic_bytes)) at = dynamic_shared + (address - DYNAMIC_AT);
  if (address >= STATIC_AT && end <= STATIC_AT + running->static_bytes) at = running->static_shared + (address - STATIC_AT);
  if (!at) fail("%u bytes at a shared address that is not of this block", bytes);
  if (uintptr_t(at) % bytes) fail("%u bytes at a shared address that is not aligned to them", bytes);
  return at;
}

void copy_begin(char* to, const char* from, unsigned bytes, unsigned given) {
  if (given > bytes) fail("a copy of %u bytes reads %u", bytes, given);
  if (uintptr_t(from) % bytes) fail("a copy of %u bytes from an address that is not aligned to them", bytes);
  for (unsigned i = 0; i < given; ++i) (void)*static_cast<const volatile char*>(from + i);  // a bad address faults here
  memset(to, 0xff, bytes);
  threads[current].copies.push_back({to, from, bytes, given, threads[current].groups});
}

void copy_commit() { ++threads[current].groups; }

void copy_wait(unsigned pending) {
  Thread& thread = threads[current];
  size_t kept = 0;
  for (const Copy& copy : thread.copies) {
    if (copy.group + pending >= thread.groups) {
      thread.copies[kept++] = copy;
      continue;
    }
    memcpy(copy.to, copy.from, copy.given);
    memset(copy.to + copy.given, 0, copy.bytes - copy.given);
  }
  thread.copies.resize(kept);
}

float rounded_rsqrt(float x) { return float(1.0 / sqrt(double(x))); }
float rounded_exp(float x) { return float(exp(double(x))); }
float rounded_sin(float x) { return float(sin(double(x))); }
float rounded_cos(float x) { return float(cos(double(x))); }

// --- what Python calls ------------------------------------------------------------------------------------------------

extern "C" {

// 0, or 1 after a failure; then *why says what it was, and *where is the address that was nobody's memory, if it was that.
int samebits_run(Body kernel, void** given, const Launch* launch, const char** why, void** where) {
  static char signal_stack[64 * 1024];
  const unsigned count = launch->block.x;
  if (!stacks) {
    stacks = static_cast<char*>(mmap(nullptr, MOST_THREADS * (STACK + GUARD), PROT_READ | PROT_WRITE,
                                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    for (unsigned i = 0; i < MOST_THREADS; ++i) mprotect(stacks + i * (STACK + GUARD), GUARD, PROT_NONE);
  }
  struct sigaction handler = {}, old_segv, old_bus;
  handler.sa_sigaction = fault;
  handler.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  stack_t alternate = {}, old_stack;
  alternate.ss_sp = signal_stack, alternate.ss_size = sizeof signal_stack;
  sigaltstack(&alternate, &old_stack);
  sigaction(SIGSEGV, &handler, &old_segv);
  sigaction(SIGBUS, &handler, &old_bus);

  body = kernel, arguments = given, running = launch;
  block_size = launch->block, grid_size = launch->grid;
  *why = message, faulted = nullptr;
  const int status = sigsetjmp(failure, 1);
  if (status == 0) {
    for (unsigned y = 0; y < grid_size.y; ++y)
      for (unsigned x = 0; x < grid_size.x; ++x) {
        block_index = {x, y, 0};
        run_block(count);
      }
  } else {
    for (Thread& thread : threads) thread.started = false;
    *where = faulted;
  }
  sigaction(SIGSEGV, &old_segv, nullptr);
  sigaction(SIGBUS, &old_bus, nullptr);
  sigaltstack(&old_stack, nullptr);
  return status;
}

void samebits_dynamic_shared(char* memory) { dynamic_shared = memory; }

// `bytes` of memory full of NaN between pages that may not be touched. Its last byte (`at_end`) or its first one is at their
// edge, as far as `remainder`, the address modulo 16, allows.
char* samebits_fenced(size_t bytes, int at_end, unsigned remainder, char** base, size_t* reserved) {
  const size_t page = sysconf(_SC_PAGESIZE), inside = (bytes + 32 + page - 1) / page * page;
  *reserved = inside + 2 * FENCE;
  *base = static_cast<char*>(mmap(nullptr, *reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (*base == MAP_FAILED) return nullptr;
  char* const first = *base + FENCE;
  mprotect(first, inside, PROT_READ | PROT_WRITE);
  memset(first, 0xff, inside);
  if (!at_end) return first + remainder;
  char* const last = first + inside - bytes;
  return last - (uintptr_t(last) - remainder) % 16;
}

void samebits_release(char* base, size_t reserved) { munmap(base, reserved); }

void samebits_elementary(int which, const float* in, float* out, size_t count) {
  float (*const function)(float) = which == 0 ? rounded_rsqrt : which == 1 ? rounded_exp : which == 2 ? rounded_sin : rounded_cos;
  for (size_t i = 0; i < count; ++i) out[i] = function(in[i]);
}

// What a kernel's own checks call.
void __assertfail(const char* what, const char*, unsigned, const char*, size_t) { fail("%s", what); }

// --- what the compiler calls where -fsanitize finds something ---------------------------------------------------------

struct Place {
  const char* file;
  unsigned line, column;
};

void __ubsan_handle_out_of_bounds_abort(Place* place, uintptr_t index) {
  fail("%s:%u: index %ld is outside its array", place->file, place->line, long(index));
}
void __ubsan_handle_shift_out_of_bounds_abort(Place* place, uintptr_t, uintptr_t by) {
  fail("%s:%u: shift by %ld", place->file, place->line, long(by));
}
void __ubsan_handle_divrem_overflow_abort(Place* place, uintptr_t, uintptr_t) {
  fail("%s:%u: division by zero", place->file, place->line);
}
void __ubsan_handle_type_mismatch_v1_abort(Place* place, uintptr_t pointer) {
  fail("%s:%u: access to %p, which is not aligned for it", place->file, place->line, (void*)pointer);
}
}
}  // namespace emulate
