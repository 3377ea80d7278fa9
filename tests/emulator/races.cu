// Every thread walks through one list of steps: reads and writes of a word by one thread, and barriers.

struct Params {
    const float* steps;  // (n, 3): kind (0 read, 1 write, 2 __syncwarp, 3 __syncthreads), thread or warp, word
    int n;
};

extern "C" __global__ void __launch_bounds__(96, 1) races(const __grid_constant__ Params params) {
    const int thread = threadIdx.x;
    if (thread < 8) st_shared_b32(shared_base() + thread * 4, 0);
    __syncthreads();
    for (int i = 0; i < params.n; ++i) {
        const int kind = static_cast<int>(ld_global_f32(params.steps + i * 3));
        const int who = static_cast<int>(ld_global_f32(params.steps + i * 3 + 1));
        const u32 word = shared_base() + static_cast<int>(ld_global_f32(params.steps + i * 3 + 2)) * 4;
        if (kind == 0 && thread == who) ld_shared_b32(word);
        if (kind == 1 && thread == who) st_shared_b32(word, 1);
        if (kind == 2 && thread / 32 == who) __syncwarp();
        if (kind == 3) __syncthreads();
    }
}
