// Shuffles, votes, indices, and exchange through shared memory at both scopes.

struct Params {
    const float* x;  // (blocks, threads)
    float* swapped;  // (blocks, threads): x of lane ^ 5
    float* turned;   // (blocks, threads): x of lane + 7, modulo 32
    // (blocks, threads, 4): lane ^ 16 by an integer shuffle; x of the lane before, of the thread before; votes
    u32* words;
    float* halves;  // (blocks, threads): sum of x over the half of the warp, by two disjoint masks
};

extern "C" __global__ void __launch_bounds__(128, 1) warps(const __grid_constant__ Params params) {
    const int lane = threadIdx.x % 32;
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    const float x = ld_global_f32(params.x + index);
    st_global_f32(params.swapped + index, __shfl_xor_sync(0xffffffffu, x, 5));
    st_global_f32(params.turned + index, __shfl_sync(0xffffffffu, x, lane + 7));

    u32 words[4];
    words[0] = __shfl_xor_sync(0xffffffffu, static_cast<u32>(lane), 16) + gridDim.x * 100;

    const u32 slot = shared_base() + threadIdx.x * 4;
    st_shared_b32(slot, index);
    __syncwarp();
    words[1] = ld_shared_b32(slot - lane * 4 + (lane + 31) % 32 * 4);
    __syncthreads();
    st_shared_b32(slot, index * 2);
    __syncthreads();
    words[2] = ld_shared_b32(shared_base() + (threadIdx.x + blockDim.x - 1) % blockDim.x * 4);

    words[3] = (__any_sync(0xffffffffu, x > 0.0f) ? 1 : 0) | (__all_sync(0xffffffffu, x > 0.0f) ? 2 : 0);
    st_global_b128(params.words + index * 4, words);

    float sum = x;
    const u32 half = lane < 16 ? 0x0000ffffu : 0xffff0000u;
    if (lane < 16) {
        for (int distance = 1; distance < 16; distance *= 2) sum += __shfl_xor_sync(half, sum, distance);
    } else {
        for (int distance = 1; distance < 16; distance *= 2) sum += __shfl_xor_sync(half, sum, distance);
    }
    st_global_f32(params.halves + index, sum);
}
