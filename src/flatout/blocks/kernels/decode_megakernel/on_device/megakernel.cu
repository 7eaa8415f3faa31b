// Products and attentions of one new token, one after the other in one launch, after steps.cu and heads.cu.
//
// M rows; an operation's own sizes are in its record. All programs run side by side, one to a processor. What one gives others
// read as soon as it is there: before that it is ABSENT, and who finds that looks again. There are two sets of such words, one
// behind the other: a launch writes one and makes the other ABSENT for the next launch. Programs never meet.
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

struct __align__(16) Op {
    const char *x, *codes, *scales, *norm, *bias, *residual;  // of x and residual none: the input of the launch
    char *y, *keys, *values, *parts;
    int is_attention;
    int N, K, is_gated;                            // of a product; N with gates and what they gate
    int heads, groups, shared, places, num_parts;  // of attention
    int each, more;                                // tiles or units of a program, and how many programs have one more
    int has_residual, is_last;                     // what is last is not read in this launch
    float eps, scale;
    float per_heads, per_shared, per_part;         // 1 over them
};
static_assert(sizeof(Op) == 160, "launching.py packs it, and lanes copy sixteen bytes each");
constexpr int LANES = sizeof(Op) / 16;

// The whole part of n / by, for n below 2^21, with 1 / by.
__device__ __forceinline__ int quotient(int n, float per) { return (int)((n + 0.5f) * per); }

struct Share { int first, num; };  // tiles or units from `first` on; units are P apart

__device__ __forceinline__ Share share_of(const Op& op) {
    int p = blockIdx.x;
    return {op.is_attention ? p : op.each * p + min(p, op.more), op.each + (p < op.more)};
}

struct Unit { int row, head, part, first, end; };

__device__ __forceinline__ Unit unit_of(const Op& op, int unit, int num_places) {
    int stretch = (quotient(num_places + op.num_parts - 1, op.per_part) + PLACES - 1) / PLACES * PLACES;
    int whole = quotient(unit, op.per_part), row = quotient(whole, op.per_heads), part = unit - whole * op.num_parts;
    return {row, whole - row * op.heads, part, part * stretch, min(part * stretch + stretch, num_places)};
}

// Pieces of eight numbers: those from `at` that are wanted, once they are there if others write them in this launch. All lanes
// of a warp come here.
template <int NUM>
__device__ __forceinline__ void read_when_there(Four (&eights)[NUM], const char* const (&at)[NUM], const bool (&wanted)[NUM],
                                                bool is_written) {
    auto look = [&]() {
        bool are_there = true;
#pragma unroll
        for (int i = 0; i < NUM; i++)
            if (wanted[i]) eights[i] = read_four_words(at[i]);
#pragma unroll
        for (int i = 0; i < NUM; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) are_there &= !wanted[i] || eights[i].at[j] != ABSENT;
        return are_there || !is_written;
    };
    while (!look()) look_again();
    meet_warp();
}

// A lane's number and that of its neighbour; all lanes of a warp come here, with numbers that are real in twos.
__device__ __forceinline__ void write_numbers(char* y, int set, long bytes, long number, float value, bool is_real) {
    float next = __shfl_xor_sync(0xffffffffu, value, 1);
    if (!is_real || number % 2) return;
    write_word(y + set * bytes + number * 2, rounded(value, next));
    *(word*)(y + (1 - set) * bytes + number * 2) = ABSENT;
}

__device__ __forceinline__ void write_part(char* part, int set, long bytes, int at, float value) {
    write_word(part + set * bytes + at * 4, __float_as_uint(value));
    *(word*)(part + (1 - set) * bytes + at * 4) = ABSENT;
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
        Share mine = share_of(op);
        if (op.is_attention) {
            for (int u = 0; u < mine.num; u++) {
                Unit unit = unit_of(op, mine.first + u * (int)gridDim.x, place + 1);
                long row = ((long)unit.row * op.groups + quotient(unit.head, op.per_shared)) * op.places;
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
__device__ __forceinline__ void take_places(Softmax& result, const char* slot, const float (&query)[8], const Four& key_then,
                                            const Four& value_then, int of_half, int first, int end, int place) {
    const char* from = slot + of_half * H * 2 + this_thread() % 16 * 16;
    float scores[EACH], above = result.top;
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
    float shrink = exp2_of(result.top - above);
    result.all *= shrink, result.top = above;
#pragma unroll
    for (int k = 0; k < 8; k++) result.acc[k] *= shrink;
#pragma unroll
    for (int n = 0; n < EACH; n++) {
        if (first + n >= end) continue;
        Four value = *(const Four*)(from + (PLACES + n) * H * 2);
        if (first + n == place) value = value_then;
        float weight = exp2_of(scores[n] - above), wide[8];
        widen(wide, value);
        result.all += weight;
#pragma unroll
        for (int k = 0; k < 8; k++) result.acc[k] += weight * wide[k];
    }
}

// A program's part of one operation of attention.
__device__ __forceinline__ void attend(Ring& ring, const Op& op, const Share& mine, int M, int place, const float* angles,
                                       float* accs, int set) {
    int thread = this_thread(), warp = thread / 32, lane = thread % 32, lane16 = lane % 16;
    long width = (op.heads + 2 * op.groups) * H, bytes = (long)M * op.heads * H * 2;
    long part_bytes = (H + 2) * 4, parts_bytes = (long)M * op.heads * op.num_parts * part_bytes;
    float *tops = accs + WARPS * H, *alls = tops + WARPS;
    for (int u = 0; u < mine.num; u++) {
        int number = mine.first + u * (int)gridDim.x;
        Unit unit = unit_of(op, number, place + 1);
        int group = quotient(unit.head, op.per_shared);
        const char* fresh = op.x + ((set * M + unit.row) * width + lane16 * 8) * 2;
        const char *of_query = fresh + unit.head * H * 2, *of_key = fresh + (op.heads + group) * H * 2;
        // A half of a warp has EACH places of a stage, one behind the other.
        int of_half = thread / 16 * EACH, other_half = (lane16 ^ 8) * 16 - lane16 * 16;
        bool has_new = unit.first <= place && place < unit.end && (place - unit.first) % PLACES / EACH * EACH == of_half;
        Four own[2], fresh_ones[3];
        read_when_there<2>(own, {of_query, of_query + other_half}, {true, true}, true);
        float query[8];
        rotate(query, own[0], own[1], angles, angles + H / 2, lane16);
        widen(query, narrowed(query));  // rounded as what a tensor would hold
#pragma unroll
        for (int k = 0; k < 8; k++) query[k] *= op.scale * 1.4426950408889634f;  // in base 2: exp2 is what the device has
        Four key_then = {}, value_then = {};
        if (lanes_where(has_new)) {
            const char* of_value = of_key + op.groups * H * 2;
            read_when_there<3>(fresh_ones, {of_key, of_key + other_half, of_value}, {has_new, has_new, has_new}, true);
            float new_key[8];
            rotate(new_key, fresh_ones[0], fresh_ones[1], angles, angles + H / 2, lane16);
            key_then = narrowed(new_key), value_then = fresh_ones[2];
        }
        if (has_new) {
            if (unit.head == group * op.shared) {
                long to = (((long)unit.row * op.groups + group) * op.places + place) * H * 2 + lane16 * 16;
                *(Four*)(op.keys + to) = key_then, *(Four*)(op.values + to) = value_then;
            }
        }
        Softmax result = {NONE, 0, {}};
        for (int first = unit.first; first < unit.end; first += PLACES, ring.next()) {
            wait_at(ring.full[ring.at], ring.round);
            take_places(result, ring.slot(), query, key_then, value_then, of_half, first + of_half, unit.end, place);
            meet_warp();
            if (lane == 0) come(ring.empty[ring.at]);
        }
        float top = result.top, all = result.all, (&acc)[8] = result.acc;
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
            char* part = op.parts + number * part_bytes;
            if (unit.part) {
                write_part(part, set, parts_bytes, n, sum);
                if (n < 2) write_part(part, set, parts_bytes, H + n, n ? all : top);
                continue;
            }
            part += set * parts_bytes;
            for (int from = 1; from < op.num_parts; from += 3) {  // three at a time are waited for
                word theirs[3];
                Two softmax[3];
                bool are_there = false;
                while (!are_there) {
                    are_there = true;
#pragma unroll
                    for (int p = 0; p < 3; p++) {
                        const char* other = part + min(from + p, op.num_parts - 1) * part_bytes;
                        theirs[p] = read_word(other + n * 4), softmax[p] = read_two_words(other + H * 4);
                    }
#pragma unroll
                    for (int p = 0; p < 3; p++)
                        are_there &= theirs[p] != ABSENT && softmax[p].at[0] != ABSENT && softmax[p].at[1] != ABSENT;
                    if (!are_there) look_again();
                }
#pragma unroll
                for (int p = 0; p < 3; p++) {
                    if (from + p >= op.num_parts) break;
                    float their_top = __uint_as_float(softmax[p].at[0]), highest = fmaxf(top, their_top);
                    float by = exp2_of(top - highest), other = exp2_of(their_top - highest);
                    sum = sum * by + __uint_as_float(theirs[p]) * other;
                    all = all * by + __uint_as_float(softmax[p].at[1]) * other, top = highest;
                }
            }
            write_numbers(op.y, set, bytes, ((long)unit.row * op.heads + unit.head) * H + n, sum / all, true);
        }
        if (u + 1 < mine.num) meet_threads<THREADS>();
    }
}

// The word of a residual that others write, or have written, in this launch; `current` was there before.
__device__ __forceinline__ word residual_when_there(const char* at, word current) {
    while (current == ABSENT) look_again(), current = read_word(at);
    return current;
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

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1) decode_megakernel(
    const char* ops, const char* input, const long long* position, const float* cosines, const float* sines, word* counters,
    int num_ops, int M, int most_in, int most_sums) {
    extern __shared__ __align__(16) char shared_memory[];
    int thread = threadIdx.x;
    char* rows = shared_memory + DEPTH * SLOT;
    float *sums = (float*)(rows + M * row_bytes(most_in)), *angles = sums + most_sums;
    Op* table = (Op*)(angles + H);
    Staging& shared = *(Staging*)(table + AHEAD);
    Gate* gates = (Gate*)(&shared + 1);
    Ring ring = {shared_memory, gates, gates + DEPTH, 0, 0};

    if (thread == 0) {
        for (int d = 0; d < DEPTH; d++) make_gate(ring.full[d], 1), make_gate(ring.empty[d], WARPS);
        gates_are_made();
    }
    for (int at = thread; at < min(num_ops, AHEAD) * LANES; at += THREADS) ((Four*)table)[at] = read_once(ops + at * 16);
    int place = position ? (int)*position : 0;  // the new one's
    for (int at = thread; position && at < H; at += THREADS)
        angles[at] = at < H / 2 ? cosines[(long)place * (H / 2) + at] : sines[(long)place * (H / 2) + at - H / 2];
    word launch = counters[0];
    int set = launch % 2;
    __syncthreads();
    if (thread >= THREADS) {
        if (thread == THREADS) ask_for_all(ring, ops, num_ops, M, place);
        return;
    }

    for (int i = 0; i < num_ops; i++) {
        const Op& op = table[i % AHEAD];
        Share mine = share_of(op);
        Four entry = {};
        bool has_entry = i && i + AHEAD - 1 < num_ops && thread < LANES;
        if (has_entry) entry = read_once(ops + ((long)i + AHEAD - 1) * sizeof(Op) + thread * 16);
        if (op.is_attention) {
            attend(ring, op, mine, M, place, angles, (float*)rows, set);
        } else {
            int K = op.K, result = op.is_gated ? 8 : 16, width = op.is_gated ? op.N / 2 : op.N;
            int first = mine.first * result, results = min(mine.num * result, width - first);
            long bytes = (long)M * width * 2;  // of a set of the results, and of the residual
            const char* x = op.x ? op.x + (long)set * M * K * 2 : input;
            const char* residual = op.residual ? op.residual + set * bytes : input;
            bool is_written = op.residual != nullptr;
            word first_residual = ABSENT;  // looked at before it is waited for
            if (is_written && thread < results) first_residual = read_word(residual + (first + thread & ~1) * 2);
            Four norms[AT_ONCE];
            read_first_norms(norms, op.norm, thread, K);
            stage(rows, shared, op.norm, norms, M, K, op.eps, [&](Four(&eights)[AT_ONCE], int m, int from) {
                const char* at[AT_ONCE];
                bool wanted[AT_ONCE];
#pragma unroll
                for (int j = 0; j < AT_ONCE; j++) {
                    wanted[j] = from + j * THREADS < K / 8;
                    at[j] = x + ((long)m * K + (from + j * THREADS) * 8) * 2;
                }
                read_when_there<AT_ONCE>(eights, at, wanted, op.x != nullptr);
            });
            multiply_all(ring, op, mine, M, rows, sums);
            meet_threads<THREADS>();
            finish(sums, shared.factors, mine.num, op.is_gated, results, M, [&](int m, int at, float value, bool is_real) {
                long to = (long)m * width + first + at;
                if (op.bias && is_real) value += low(((const unsigned short*)op.bias)[first + at]);
                if (is_written && is_real) {
                    word current = residual_when_there(residual + (to & ~1L) * 2, m || at != thread ? ABSENT : first_residual);
                    value += to % 2 ? high(current) : low(current);
                } else if (op.has_residual && is_real) {
                    value += low(read_shared_half((const unsigned short*)residual + to));
                }
                if (!op.is_last) write_numbers(op.y, set, bytes, to, value, is_real);
                else if (is_real) ((unsigned short*)op.y)[to] = (unsigned short)rounded(value, 0);
            });
        }
        if (has_entry) ((Four*)(table + (i + AHEAD - 1) % AHEAD))[thread] = entry;
        meet_threads<THREADS>();
    }
    // Whoever ends last counts the launch: all have read how many there were.
    if (thread == 0 && count_up(counters + 1) + 1 == gridDim.x) counters[1] = 0, counters[0] = launch + 1;
}
