// One warp: stmatrix of four matrices, and what ldmatrix then gives back.

struct Params {
    const u32* fragments;  // (32, 4): what each lane stores
    u32* rows;             // (32, 4): rows of 16 bytes as they lie in shared memory
    u32* again;            // (32, 4): what ldmatrix_x4 gives each lane
    const float* order;    // (32): the place of the row whose address each lane gives
};

extern "C" __global__ void __launch_bounds__(32, 1) matrices(const __grid_constant__ Params params) {
    const int lane = threadIdx.x;
    const u32 row = shared_base() + static_cast<int>(ld_global_f32(params.order + lane)) * 16;
    u32 v[4];
    ld_global_b128(v, params.fragments + lane * 4);
    stmatrix_x4(row, v);
    __syncwarp();
    u32 again[4];
    ldmatrix_x4(again, row);
    st_global_b128(params.again + lane * 4, again);
    ld_shared_b128(v, shared_base() + lane * 16);
    st_global_b128(params.rows + lane * 4, v);
}
