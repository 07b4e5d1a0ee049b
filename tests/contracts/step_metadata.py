"""A stand-in for what vLLM tells a metadata builder of a step."""

import dataclasses


@dataclasses.dataclass
class Common:
    """`CommonAttentionMetadata` of vLLM 0.32, as far as the plugin reads and makes it."""

    query_start_loc: object
    query_start_loc_cpu: object
    seq_lens: object
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: object
    slot_mapping: object
    positions: object = None
    is_prefilling: object = None
    seq_lens_cpu_upper_bound: object = None
    req_idx: object = None
    _num_computed_tokens_cache: object = None
    _token_to_req_indices_cache: object = None

    def replace(self, **changes):
        return dataclasses.replace(self, **changes)
