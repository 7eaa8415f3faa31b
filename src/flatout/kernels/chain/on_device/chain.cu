// Products and attentions of one new token, one after the other in one launch, after steps.cu and heads.cu.
//
// M rows; an operation's own sizes are in its record. All programs run side by side, one to a processor. What one gives others
// read as soon as it is there: numbers lie in pairs with a stamp, another one for each operation of each launch, and who finds
// another stamp looks again. Programs never meet.
//
// WARPS warps of a program compute. One thread more does nothing but ask for what they will read, DEPTH stages ahead of them, of
// this operation and of the next ones: weights, and keys and values of older places, which nothing in this launch writes. So
// memory goes on while programs wait for each other. No more than BEGUN stages are on their way at a time: with more, what
// programs tell each other would wait behind them.
//
// A product's tiles are shared out among programs; a stage is EACH steps for each warp, one after the other as they lie. Sums
// are added up in a fixed order. Attention is cut into units, a part of the places of a head of a row; a stage is EACH places
// for each half of a warp. The program of a head's first part joins all.

constexpr int STEPS = EACH * WARPS, PLACES = 2 * STEPS, AHEAD = 4, SLOT = STEPS * (1024 + SCALES);

struct Op {
    const char *x, *codes, *scales, *norm, *bias, *residual;
    char *y, *keys, *values;
    int is_attention, N, K, is_gated;  // of a product; N with gates and what they gate
    int heads, shared, places, parts;  // of attention
    float eps, scale;
    int x_from, residual_from;  // the operations that give them, counted from 1; 0: what the launch is given; - 1: there is none
    int is_last;                // its result has no stamps
    int unused;
};
static_assert(sizeof(Op) == 128, "eight lanes copy a record");

struct Share { int first, num; };  // tiles or units from `first` on; units are P apart

__device__ __forceinline__ int stretch_of(const Op& op, int num_places) {
    return ((num_places + op.parts - 1) / op.parts + PLACES - 1) / PLACES * PLACES;
}

__device__ __forceinline__ Share share_of(const Op& op, int M) {
    int P = gridDim.x, p = blockIdx.x;
    if (op.is_attention) {
        int units = M * op.heads * op.parts;
        return {p, p < units ? (units - p - 1) / P + 1 : 0};
    }
    int tiles = (op.N + 15) / 16, first = tiles / P * p + min(p, tiles % P);
    return {first, tiles / P + (p < tiles % P)};
}

struct Unit { int row, head, first, end; };

__device__ __forceinline__ Unit unit_of(const Op& op, int unit, int num_places) {
    int stretch = stretch_of(op, num_places), first = unit % op.parts * stretch;
    return {unit / op.parts / op.heads, unit / op.parts % op.heads, first, min(first + stretch, num_places)};
}

// Pieces of eight numbers that others write in this launch: those from `at` that are wanted, once they are there. All lanes of a
// warp come here. Who waits longest looks alone until his is there: all lanes of all programs at once would be too much traffic.
template <int NUM>
__device__ __forceinline__ void read_when_there(Four (&eights)[NUM], const char* const (&at)[NUM], const bool (&wanted)[NUM],
                                                word stamp) {
    Pair pairs[NUM][4];
    auto look = [&]() {
        bool are_there = true;
#pragma unroll
        for (int i = 0; i < NUM; i++)
            if (wanted[i]) read_two_pairs(pairs[i], at[i]), read_two_pairs(pairs[i] + 2, at[i] + 16);
#pragma unroll
        for (int i = 0; i < NUM; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) are_there &= !wanted[i] || pairs[i][j].stamp == stamp;
        return are_there;
    };
    bool are_there = look();
    while (word missing = lanes_where(!are_there)) {
        if (this_thread() % 32 == __ffs(missing) - 1)
            while (!are_there) look_again(), are_there = look();
        meet_warp();
        if (!are_there) are_there = look();
    }
#pragma unroll
    for (int i = 0; i < NUM; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) eights[i].at[j] = pairs[i][j].data;
}

// A lane's number and that of its neighbour; all lanes of a warp come here, with numbers that are real in twos.
__device__ __forceinline__ void write_stamped(char* y, long number, float value, bool is_real, word stamp) {
    float next = __shfl_xor_sync(0xffffffffu, value, 1);
    if (is_real && number % 2 == 0) write_pair(y + number * 4, rounded(value, next), stamp);
}

// What is on its way, and where a warp or the thread that asks is in it.
struct Ring {
    char* slots;
    Gate *full, *empty;
    int at, round;
    __device__ __forceinline__ char* slot() const { return slots + at * SLOT; }
    __device__ __forceinline__ void next() {
        if (++at == DEPTH) at = 0, round ^= 1;
    }
};

// The thread that asks: all stages of all operations, in the order in which they are taken.
__device__ __forceinline__ void ask_for_all(Ring ring, const char* ops, int num_ops, int M, int place) {
    Ring late = ring;  // BEGUN stages behind
    int asked = 0;
    auto next_slot = [&](int bytes) {
        wait_at(ring.empty[ring.at], ring.round ^ 1);
        if (asked++ >= BEGUN) wait_at(late.full[late.at], late.round), late.next();
        come_and_expect(ring.full[ring.at], bytes);
    };
    for (int i = 0; i < num_ops; i++) {
        const Op op = *(const Op*)(ops + (long)i * sizeof(Op));
        Share mine = share_of(op, M);
        if (op.is_attention) {
            for (int u = 0; u < mine.num; u++) {
                Unit unit = unit_of(op, mine.first + u * (int)gridDim.x, place + 1);
                long row = ((long)unit.row * (op.heads / op.shared) + unit.head / op.shared) * op.places;
                for (int first = unit.first; first < unit.end; first += PLACES, ring.next()) {
                    int bytes = max(min(min(first + PLACES, unit.end), place) - first, 0) * H * 2;
                    next_slot(2 * bytes);
                    if (!bytes) continue;
                    begin_bulk_copy(ring.slot(), op.keys + (row + first) * H * 2, bytes, ring.full[ring.at]);
                    begin_bulk_copy(ring.slot() + PLACES * H * 2, op.values + (row + first) * H * 2, bytes, ring.full[ring.at]);
                }
            }
            continue;
        }
        int left = mine.num * (op.K / STEP);
        const char *codes = op.codes + (long)mine.first * (op.K / STEP) * 1024;
        const char* scales = op.scales + (long)mine.first * (op.K / STEP) * 32;
        for (; left > 0; left -= STEPS, codes += STEPS * 1024, scales += STEPS * 32, ring.next()) {
            int steps = min(left, STEPS);
            next_slot(steps * (1024 + SCALES));
            begin_bulk_copy(ring.slot(), codes, steps * 1024, ring.full[ring.at]);
            if (BITS == 4) begin_bulk_copy(ring.slot() + STEPS * 1024, scales, steps * 32, ring.full[ring.at]);
        }
    }
}

struct Softmax { float top, all, acc[8]; };  // of some places: the largest score, the sum of weights, and that of weighted values

// A stage more: this half of a warp has EACH places of it, of which the first is place `first`, `of_half` places on in the stage.
__device__ __forceinline__ void take_places(Softmax& made, const char* slot, const float (&query)[8], const Four& key_then,
                                            const Four& value_then, int of_half, int first, int end, int place) {
    const char* from = slot + of_half * H * 2 + this_thread() % 16 * 16;
    float scores[EACH], above = made.top;
#pragma unroll
    for (int n = 0; n < EACH; n++) {
        Four key = *(const Four*)(from + n * H * 2);
        if (first + n == place) key = key_then;
        float wide[8];
        widen(wide, key);
        scores[n] = 0;
#pragma unroll
        for (int k = 0; k < 8; k++) scores[n] += query[k] * wide[k];
    }
#pragma unroll
    for (int far = 8; far; far /= 2)
#pragma unroll
        for (int n = 0; n < EACH; n++) scores[n] += __shfl_xor_sync(0xffffffffu, scores[n], far);
#pragma unroll
    for (int n = 0; n < EACH; n++) {
        if (first + n >= end) scores[n] = NONE;
        above = fmaxf(above, scores[n]);
    }
    float shrink = exp2_of(made.top - above);
    made.all *= shrink, made.top = above;
#pragma unroll
    for (int k = 0; k < 8; k++) made.acc[k] *= shrink;
#pragma unroll
    for (int n = 0; n < EACH; n++) {
        if (first + n >= end) continue;
        Four value = *(const Four*)(from + (PLACES + n) * H * 2);
        if (first + n == place) value = value_then;
        float weight = exp2_of(scores[n] - above), wide[8];
        widen(wide, value);
        made.all += weight;
#pragma unroll
        for (int k = 0; k < 8; k++) made.acc[k] += weight * wide[k];
    }
}

// A program's part of one operation of attention; `parts` are pairs.
__device__ __forceinline__ void attend(Ring& ring, const Op& op, const Share& mine, int M, int place, const float* angles,
                                       char* parts, float* accs, word stamp, word before) {
    int thread = this_thread(), warp = thread / 32, lane = thread % 32, lane16 = lane % 16, groups = op.heads / op.shared;
    float *tops = accs + WARPS * H, *alls = tops + WARPS;
    for (int u = 0; u < mine.num; u++) {
        int number = mine.first + u * (int)gridDim.x;
        Unit unit = unit_of(op, number, place + 1);
        int group = unit.head / op.shared;
        const char* fresh = op.x + ((long)unit.row * (op.heads + 2 * groups) * H + lane16 * 8) * 4;
        const char *of_query = fresh + unit.head * H * 4, *of_key = fresh + (op.heads + group) * H * 4;
        // A half of a warp has EACH places of a stage, one behind the other.
        int of_half = thread / 16 * EACH, other_half = (lane16 ^ 8) * 32 - lane16 * 32;
        bool has_new = unit.first <= place && place < unit.end && (place - unit.first) % PLACES / EACH * EACH == of_half;
        Four own[2], fresh_ones[3];
        read_when_there<2>(own, {of_query, of_query + other_half}, {true, true}, before + op.x_from);
        float query[8];
        turned(query, own[0], own[1], angles, angles + H / 2, lane16);
        widen(query, narrowed(query));  // rounded as what a tensor would hold
#pragma unroll
        for (int k = 0; k < 8; k++) query[k] *= op.scale * 1.4426950408889634f;  // in base 2: exp2 is what the device has
        Four key_then = {}, value_then = {};
        if (lanes_where(has_new)) {
            read_when_there<3>(fresh_ones, {of_key, of_key + other_half, of_key + groups * H * 4}, {has_new, has_new, has_new},
                               before + op.x_from);
            float new_key[8];
            turned(new_key, fresh_ones[0], fresh_ones[1], angles, angles + H / 2, lane16);
            key_then = narrowed(new_key), value_then = fresh_ones[2];
        }
        if (has_new) {
            if (unit.head % op.shared == 0) {
                long to = (((long)unit.row * groups + group) * op.places + place) * H * 2 + lane16 * 16;
                *(Four*)(op.keys + to) = key_then, *(Four*)(op.values + to) = value_then;
            }
        }
        Softmax made = {NONE, 0, {}};
        for (int first = unit.first; first < unit.end; first += PLACES, ring.next()) {
            wait_at(ring.full[ring.at], ring.round);
            take_places(made, ring.slot(), query, key_then, value_then, of_half, first + of_half, unit.end, place);
            meet_warp();
            if (lane == 0) come(ring.empty[ring.at]);
        }
        float top = made.top, all = made.all, (&acc)[8] = made.acc;
        // The halves of a warp, then the warps, then the parts, by the last program of a head.
        float above = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 16)), by = exp2_of(top - above);
        all *= by;
        all += __shfl_xor_sync(0xffffffffu, all, 16);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            acc[k] *= by;
            acc[k] += __shfl_xor_sync(0xffffffffu, acc[k], 16);
        }
        if (lane < 16)
#pragma unroll
            for (int k = 0; k < 8; k++) accs[warp * H + lane * 8 + k] = acc[k];
        if (lane == 0) tops[warp] = above, alls[warp] = all;
        meet_threads<THREADS>();
        for (int n = thread; n < H; n += THREADS) {
            float sum = 0, all = 0, top = NONE;
#pragma unroll
            for (int w = 0; w < WARPS; w++) top = fmaxf(top, tops[w]);
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                float by = exp2_of(tops[w] - top);
                sum += by * accs[w * H + n], all += by * alls[w];
            }
            if (number % op.parts) {
                char* to = parts + (long)number * (H + 2) * 8;
                write_pair(to + n * 8, __float_as_uint(sum), stamp);
                if (n < 2) write_pair(to + (H + n) * 8, __float_as_uint(n ? all : top), stamp);
                continue;
            }
            for (int from = 1; from < op.parts; from += 3) {  // three at a time are waited for
                Pair theirs[3][3];
                bool are_there = false;
                while (!are_there) {
                    are_there = true;
#pragma unroll
                    for (int p = 0; p < 3; p++) {
                        const char* part = parts + (long)(number + min(from + p, op.parts - 1)) * (H + 2) * 8;
                        theirs[p][0] = read_pair(part + n * 8);
                        read_two_pairs(theirs[p] + 1, part + H * 8);
                    }
#pragma unroll
                    for (int p = 0; p < 9; p++) are_there &= theirs[p / 3][p % 3].stamp == stamp;
                    if (!are_there) look_again();
                }
#pragma unroll
                for (int p = 0; p < 3; p++) {
                    if (from + p >= op.parts) break;
                    float their_top = __uint_as_float(theirs[p][1].data), highest = fmaxf(top, their_top);
                    float by = exp2_of(top - highest), other = exp2_of(their_top - highest);
                    sum = sum * by + __uint_as_float(theirs[p][0].data) * other;
                    all = all * by + __uint_as_float(theirs[p][2].data) * other, top = highest;
                }
            }
            write_stamped(op.y, ((long)unit.row * op.heads + unit.head) * H + n, sum / all, true, stamp);
        }
        if (u + 1 < mine.num) meet_threads<THREADS>();
    }
}

__device__ __forceinline__ float residual_of(const Op& op, const char* given, long number, Pair pair, word before) {
    if (!op.residual_from) return low(read_shared_half((const unsigned short*)given + number));
    while (pair.stamp != before + op.residual_from) look_again(), pair = read_pair(op.residual + (number & ~1L) * 4);
    return number % 2 ? high(pair.data) : low(pair.data);
}

// What a warp has of a stage.
__device__ __forceinline__ void read_stage(Codes (&all)[EACH], const char* slot, int warp, int lane) {
#pragma unroll
    for (int s = 0; s < EACH; s++) {
        int step = warp * EACH + s;
        all[s] = step_of(slot + step * 1024, slot + STEPS * 1024 + step * 32, lane);
    }
}

// A program's part of one product, of staged rows.
__device__ __forceinline__ void multiply_all(Ring& ring, const Op& op, const Share& mine, int M, const char* rows, float* sums) {
    int thread = this_thread(), warp = thread / 32, lane = thread % 32, steps = op.K / STEP, num = mine.num * steps;
    float c[PASSES][4] = {};
    auto stage_done = [&]() {
        meet_warp();
        if (lane == 0) come(ring.empty[ring.at]);
        ring.next();
    };
    if (PASSES == 1 && steps == STEPS) {  // a stage is a tile, and a warp has the same inputs of each
        Columns columns[EACH];
#pragma unroll
        for (int s = 0; s < EACH; s++) columns[s] = columns_of(rows, M, op.K, 0, warp * EACH + s, lane);
        for (int tile = 0; tile < mine.num; tile++) {
            Codes all[EACH];
            wait_at(ring.full[ring.at], ring.round);
            read_stage(all, ring.slot(), warp, lane);
            stage_done();
            take<EACH>(c[0], all, columns);
            keep_part(sums, mine.num, warp, tile, lane, M, c);
        }
        return;
    }
    int tile = 0, in = EACH * warp;  // the step in the tile
    auto tile_done = [&]() { keep_part(sums, mine.num, warp, tile, lane, M, c), tile++, in -= steps; };
    for (int left = num - EACH * warp; left > -EACH * warp; left -= STEPS, in += STEPS) {
        wait_at(ring.full[ring.at], ring.round);
        while (in >= steps && tile < mine.num) tile_done();
        if (left >= EACH && in + EACH <= steps) {  // all of one tile, as mostly
            Codes all[EACH];
            read_stage(all, ring.slot(), warp, lane);
            stage_done();
            take_all<EACH>(c, all, rows, M, op.K, in, lane);
        } else {
            const char *codes = ring.slot() + warp * EACH * 1024, *scales = ring.slot() + STEPS * 1024 + warp * EACH * 32;
            for (int s = 0; s < min(left, EACH); s++, in++) {
                if (in >= steps) tile_done();
                Codes one[1] = {step_of(codes + s * 1024, scales + s * 32, lane)};
                take_all<1>(c, one, rows, M, op.K, in, lane);
            }
            in -= max(min(left, EACH), 0);
            stage_done();
        }
    }
    while (tile < mine.num) tile_done();
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1) chain(
    const char* ops, const char* given, const long long* position, const float* cosines, const float* sines, char* parts,
    word* counters, int num_ops, int M, int most_in, int most_sums) {
    extern __shared__ __align__(16) char kept[];
    int thread = threadIdx.x;
    char* rows = kept + DEPTH * SLOT;
    float *sums = (float*)(rows + M * row_bytes(most_in)), *angles = sums + most_sums;
    Op* table = (Op*)(angles + H);
    Staging& shared = *(Staging*)(table + AHEAD);
    Gate* gates = (Gate*)(&shared + 1);
    Ring ring = {kept, gates, gates + DEPTH, 0, 0};

    if (thread == 0) {
        for (int d = 0; d < DEPTH; d++) make_gate(ring.full[d], 1), make_gate(ring.empty[d], WARPS);
        gates_are_made();
    }
    for (int at = thread; at < min(num_ops, AHEAD) * 8; at += THREADS) ((Four*)table)[at] = read_once(ops + at * 16);
    int place = position ? (int)*position : 0;  // the new one's
    for (int at = thread; position && at < H; at += THREADS)
        angles[at] = at < H / 2 ? cosines[(long)place * (H / 2) + at] : sines[(long)place * (H / 2) + at - H / 2];
    word before = counters[0];  // the last launch's last stamp
    __syncthreads();
    if (thread >= THREADS) {
        if (thread == THREADS) ask_for_all(ring, ops, num_ops, M, place);
        return;
    }

    for (int i = 0; i < num_ops; i++) {
        const Op& op = table[i % AHEAD];
        Share mine = share_of(op, M);
        word stamp = before + i + 1;
        Four first_norm = {}, entry = {};
        if (op.norm && thread < op.K / 8) first_norm = read_once(op.norm + thread * 16);
        if (i && i + AHEAD - 1 < num_ops && thread < 8) entry = read_once(ops + ((long)i + AHEAD - 1) * sizeof(Op) + thread * 16);
        if (op.is_attention) {
            attend(ring, op, mine, M, place, angles, parts, (float*)rows, stamp, before);
        } else {
            int K = op.K;
            int made = op.is_gated ? 8 : 16, width = op.is_gated ? op.N / 2 : op.N;
            int first = mine.first * made, results = min(mine.num * made, width - first);
            Pair first_residual = {};  // looked at before it is waited for
            if (op.residual_from > 0 && thread < results) first_residual = read_pair(op.residual + (first + thread & ~1) * 4);
            stage(rows, shared, op.norm, first_norm, M, K, op.eps, [&](Four(&eights)[AT_ONCE], int m, int from) {
                const char* at[AT_ONCE];
                bool wanted[AT_ONCE];
#pragma unroll
                for (int j = 0; j < AT_ONCE; j++) {
                    wanted[j] = from + j * THREADS < K / 8;
                    at[j] = (op.x_from ? op.x : given) + ((long)m * K + (from + j * THREADS) * 8) * (op.x_from ? 4 : 2);
                    if (!op.x_from && wanted[j]) eights[j] = read_shared_result(at[j]);
                }
                if (op.x_from) read_when_there<AT_ONCE>(eights, at, wanted, before + op.x_from);
            });
            multiply_all(ring, op, mine, M, rows, sums);
            meet_threads<THREADS>();
            finish(sums, shared.factors, mine.num, op.is_gated, results, M, [&](int m, int at, float value, bool is_real) {
                long to = (long)m * width + first + at;
                if (op.bias && is_real) value += low(((const unsigned short*)op.bias)[first + at]);
                Pair seen = m || at != thread ? Pair() : first_residual;
                if (op.residual_from >= 0 && is_real) value += residual_of(op, given, to, seen, before);
                if (!op.is_last) write_stamped(op.y, to, value, is_real, stamp);
                else if (is_real) ((unsigned short*)op.y)[to] = (unsigned short)rounded(value, 0);
            });
        }
        if (i && i + AHEAD - 1 < num_ops && thread < 8) ((Four*)(table + (i + AHEAD - 1) % AHEAD))[thread] = entry;
        meet_threads<THREADS>();
    }
    // Whoever ends last leaves the stamp for the next launch: all have read the one of this launch.
    if (thread == 0 && count_up(counters + 1) + 1 == gridDim.x) counters[1] = 0, counters[0] = before + num_ops;
}
