// Turns of blocks at something in global memory: a number that each raises by one when it is done.

// Returns once the number is `turn`. What those before wrote, before they passed the turn on, is there.
__device__ __forceinline__ void turn_await(const u32* number, u32 turn) {
    u32 now;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(number) : "memory");
    } while (now != turn);
}

// The calling thread is done with its turn.
__device__ __forceinline__ void turn_pass(u32* number) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(number) : "memory");
}

// Orders what the calling thread knows to be in global memory before what its copy engine does there next.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
