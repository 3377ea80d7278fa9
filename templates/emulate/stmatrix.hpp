// Four 8x8 matrices of 16-bit elements to shared memory (PTX ISA, "stmatrix"): the inverse of ldmatrix_x4. In the race
// detector the lane that gives a row's address is the one that writes it.

namespace emu {

struct StoreMatrix {
    const u32* fragments;
    u32 address;
};

static void store_matrix(Warp& warp, u32, int line) {
    for (u32 lane = 0; lane < LANES; lane++) {
        const Fiber& fiber = warp.lanes[lane];
        u8* row = shared_write(fiber, ((StoreMatrix*)fiber.operands)->address, 16, line);
        for (u32 i = 0; i < 4; i++) {
            const Fiber& from = warp.lanes[lane % 8 * 4 + i];
            memcpy(row + 4 * i, &((StoreMatrix*)from.operands)->fragments[lane / 8], 4);
        }
    }
}

}  // namespace emu

static inline void stmatrix_x4(u32 addr, const u32 (&r)[4], int line = __builtin_LINE()) {
    emu::StoreMatrix operands = {r, addr};
    emu::collective("stmatrix_x4", emu::ALL_LANES, &operands, line, emu::store_matrix);
}
