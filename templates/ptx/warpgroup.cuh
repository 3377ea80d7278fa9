// Register budgets of warpgroups, and barriers of a part of the block.

// The calling warpgroup has N registers a thread from here on, more than before; it waits until they are free.
template <int N>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

// Fewer than before: the others are free for warpgroups that ask for more.
template <int N>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// No instruction: `x`, of which the compiler does not see where it comes from. What it has from the number of a thread
// it would rather read anew wherever it is used than keep, and reading that takes a hundred cycles.
__device__ __forceinline__ int kept(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// Barrier `id` (1 to 15; 0 is that of __syncthreads) of `threads` threads, whole warps: those that sync wait for all.
__device__ __forceinline__ void named_barrier_sync(u32 id, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives without waiting.
__device__ __forceinline__ void named_barrier_arrive(u32 id, u32 threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
