// How the threads of a block run on one CPU thread: each is a fiber, which runs until it must wait for others. The order is
// fixed, so every run is the same run. What a kernel may do to a block and its warps is declared here, for device.h and ptx.h.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace emulate {

constexpr int WARP = 32, WORDS = 10;

// Lanes of a warp that meet at one instruction: each brings words, the last one to come computes what each takes away.
struct Warp {
  unsigned in[WARP][WORDS], out[WARP][4];
  unsigned all, live, arrived;  // a bit per lane: those there are, that have not returned, that wait
  unsigned generation;
  const char* instruction;
};
typedef void (*Meeting)(Warp& warp);

struct Size {
  unsigned x, y, z;
};

struct Launch {
  Size grid, block;
  unsigned dynamic_bytes;
  int order;            // of the threads: 0 ascending, 1 descending
  char* static_shared;  // of the kernel's static __shared__ variables
  size_t static_bytes;
};

extern Size thread_index, block_index, block_size, grid_size;
extern unsigned lane;
extern char* dynamic_shared;

// Ends the launch with a message.
[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char* format, ...);
const unsigned* meet(const char* instruction, Meeting meeting);
Warp& my_warp();
// `count` threads; 0 stands for all that have not returned.
void barrier(unsigned number, unsigned count);

// Addresses of shared memory as instructions take them, and back, checked for `bytes` of them.
unsigned shared_address(const void* pointer);
char* shared_pointer(unsigned address, unsigned bytes);

// Asynchronous copies: what arrives is poison until the copy is waited for, because nothing promises it any earlier.
void copy_begin(char* to, const char* from, unsigned bytes, unsigned given);
void copy_commit();
void copy_wait(unsigned pending);

float rounded_rsqrt(float x);
float rounded_exp(float x);
float rounded_sin(float x);
float rounded_cos(float x);

typedef void (*Body)(void** arguments);
}  // namespace emulate
