// Four 8x8 matrices of 16-bit elements from shared memory (PTX ISA, "ldmatrix"): lane l gives the address of row l % 8
// of matrix l / 8. Without .trans, lane l receives elements (l / 4, 2 (l % 4)) and the next of each matrix; with it, of
// its transpose. In the race detector the lane that gives a row's address is the one that reads it.

namespace emu {

struct LoadMatrix {
    u32* fragments;
    u32 address;
};

static void read_rows(u16 (&rows)[LANES][8], Warp& warp, int line) {
    for (u32 lane = 0; lane < LANES; lane++) {
        const Fiber& fiber = warp.lanes[lane];
        memcpy(rows[lane], shared_read(fiber, ((LoadMatrix*)fiber.operands)->address, 16, line), 16);
    }
}

static void load_matrix(Warp& warp, u32, int line) {
    u16 rows[LANES][8];
    read_rows(rows, warp, line);
    for (u32 lane = 0; lane < LANES; lane++) {
        u32* fragments = ((LoadMatrix*)warp.lanes[lane].operands)->fragments;
        for (u32 matrix = 0; matrix < 4; matrix++)
            memcpy(&fragments[matrix], &rows[matrix * 8 + lane / 4][lane % 4 * 2], 4);
    }
}

static void load_matrix_trans(Warp& warp, u32, int line) {
    u16 rows[LANES][8];
    read_rows(rows, warp, line);
    for (u32 lane = 0; lane < LANES; lane++) {
        u32* fragments = ((LoadMatrix*)warp.lanes[lane].operands)->fragments;
        for (u32 matrix = 0; matrix < 4; matrix++) {
            const u16(*row)[8] = &rows[matrix * 8 + lane % 4 * 2];
            fragments[matrix] = row[0][lane / 4] | (u32)row[1][lane / 4] << 16;
        }
    }
}

}  // namespace emu

static inline void ldmatrix_x4(u32 (&r)[4], u32 addr, int line = __builtin_LINE()) {
    emu::LoadMatrix operands = {r, addr};
    emu::collective("ldmatrix_x4", emu::ALL_LANES, &operands, line, emu::load_matrix);
}

static inline void ldmatrix_x4_trans(u32 (&r)[4], u32 addr, int line = __builtin_LINE()) {
    emu::LoadMatrix operands = {r, addr};
    emu::collective("ldmatrix_x4_trans", emu::ALL_LANES, &operands, line, emu::load_matrix_trans);
}
