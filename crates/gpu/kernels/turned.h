// A row's rotation in threadgroup memory: its last `turned` pairs by turns [turned, 2].
inline void turn_row(threadgroup float* values,
                     uint width,
                     uint turned,
                     device const float* turns,
                     bool source,
                     uint tid,
                     uint threads) {
    for (uint i = tid; i < turned; i += threads) {
        device const float* turn = turns + i * 2;
        threadgroup float* pair = values + width - 2 * turned + 2 * i;
        float a = pair[0];
        float b = pair[1];
        float u = a * turn[0] - b * turn[1];
        float v = a * turn[1] + b * turn[0];
        pair[0] = source ? round_bf16(u) : u;
        pair[1] = source ? round_bf16(v) : v;
    }
}
