// Every thread walks through one list of steps: reads and writes of a word by one thread, and barriers of all kinds.

struct Params {
    const float* steps;  // (n, 4): kind, thread or warp, word or barrier, phase or warps
    int n;
};

__device__ __forceinline__ int warps_of(int mask) {
    return (mask & 1) + (mask >> 1 & 1) + (mask >> 2 & 1) + (mask >> 3 & 1);
}

// Steps by kind: 0 read and 1 write of a word by a thread; 2 __syncwarp of a warp; 3 __syncthreads; 4 arrival at an
// mbarrier by a thread, or 5 by each lane of a warp; 6 wait of a thread; 7 a named barrier of the warps of a mask, at
// which those of another mask only arrive.
extern "C" __global__ void __launch_bounds__(128, 1) handovers(const __grid_constant__ Params params) {
    const int thread = threadIdx.x, warp = thread / 32;
    const u32 barriers = shared_base() + 64;
    if (thread < 8) st_shared_b32(shared_base() + thread * 4, 0);
    if (thread == 0) {
        for (int i = 0; i < 32; ++i) mbarrier_init(barriers + i * 8, i < 16 ? 1 : 32);
    }
    __syncthreads();
    for (int i = 0; i < params.n; ++i) {
        const float* step = params.steps + i * 4;
        const int kind = static_cast<int>(ld_global_f32(step)), who = static_cast<int>(ld_global_f32(step + 1));
        const int what = static_cast<int>(ld_global_f32(step + 2)), more = static_cast<int>(ld_global_f32(step + 3));
        if (kind == 0 && thread == who) ld_shared_b32(shared_base() + what * 4);
        if (kind == 1 && thread == who) st_shared_b32(shared_base() + what * 4, 1);
        if (kind == 2 && warp == who) __syncwarp();
        if (kind == 3) __syncthreads();
        if (kind == 4 && thread == who) mbarrier_arrive(barriers + what * 8);
        if (kind == 5 && warp == who) mbarrier_arrive(barriers + what * 8);
        if (kind == 6 && thread == who) mbarrier_wait(barriers + what * 8, more);
        const int members = (who | what) >> warp & 1;
        const int threads = 32 * warps_of(who | what);
        if (kind == 7 && members) {
            if (who >> warp & 1)
                named_barrier_sync(1 + more, threads);
            else
                named_barrier_arrive(1 + more, threads);
        }
    }
}
