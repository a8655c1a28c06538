// Stands in for the resident scheduler while it is measured what that one costs a step (runtime/launch_choice.py): a block
// of as many threads that reads host memory until it is told to stop.
typedef unsigned long long u64;

// words: {in: 1 to stop, out: 1 once it runs, 2 if it gave up after limit_ns}, in host memory.
extern "C" __global__ void __launch_bounds__(256) resident_stand_in(volatile u64* words, u64 limit_ns) {
  u64 begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  if (threadIdx.x == 0) words[1] = 1;
  bool stop = false;
  while (!stop) {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    const bool late = now - begin > limit_ns;
    stop = __syncthreads_or(threadIdx.x == 0 && (words[0] != 0 || late));
    if (stop && threadIdx.x == 0 && late) words[1] = 2;
  }
}
