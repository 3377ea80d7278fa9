// Copies of single words beside words that stay as they are, and beside a wide copy of the same group.

struct Params {
    const u32* in;  // (64)
    u32* out;       // (68)
};

extern "C" __global__ void __launch_bounds__(64, 1) words(const __grid_constant__ Params params) {
    const int thread = threadIdx.x;
    const u32 smem = shared_base(), wide = smem + 256, mine = smem + thread * 4;
    st_shared_b32(mine, 0xffffffffu);
    __syncthreads();
    // Of four words the first is copied from some place, the third becomes zero; that has its source past the end.
    if (thread % 2 == 0) cp_async_4(mine, params.in + (thread % 4 ? 64 : thread * 7 % 64), thread % 4 == 0);
    if (thread == 63) cp_async_16(wide, params.in + 4, true);
    cp_async_commit();
    if (thread % 2 == 1) st_shared_b32(mine, 2 * ld_shared_b32(mine));  // while those beside it are on their way
    cp_async_wait<0>();
    __syncthreads();
    st_global_b32(params.out + thread, ld_shared_b32(mine));
    if (thread < 4) st_global_b32(params.out + 64 + thread, ld_shared_b32(wide + thread * 4));
}
