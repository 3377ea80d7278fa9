// The functions of one number.

struct Params {
    const float* x;
    float* exp2;
    float* log2;
    float* tanh;
    u32* packed;  // (n, 4): bf16 and f16 pairs of (x, -x), then of (x / 3, x)
    int n;
};

extern "C" __global__ void __launch_bounds__(128, 1) numbers(const __grid_constant__ Params params) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= params.n) return;
    const float x = ld_global_f32(params.x + i);
    st_global_f32(params.exp2 + i, exp2_approx(x));
    st_global_f32(params.log2 + i, log2_approx(x));
    st_global_f32(params.tanh + i, tanh_approx(x));
    const u32 packed[4] = {pack_bf16(x, -x), pack_f16(x, -x), pack_bf16(x / 3.0f, x), pack_f16(x / 3.0f, x)};
    st_global_b128(params.packed + i * 4, packed);
}
