//! Which layer reads whose compressed entries, and the rules between fields.

use serde::Serialize;

use super::Config;

/// What a layer's attention does beyond its window [spec 0].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Window only.
    Window,
    /// Own compressed entries, own index keys, own selection.
    Full,
    /// The entries and keys of the candidate source, own selection among its candidate blocks.
    Reindex,
    /// Entries and selection of earlier layers.
    Reuse,
}

/// One backbone layer's place in the schedule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LayerPlan {
    /// Tokens per compressed entry; 0 where only the window is read.
    pub ratio: usize,
    /// What the layer makes itself.
    pub role: Role,
    /// Layer whose compressed entries are read.
    pub kv_source: Option<usize>,
    /// Layer whose selection is used.
    pub index_source: Option<usize>,
    /// Whether the layer publishes candidate blocks.
    pub candidate_source: bool,
    /// Place in the Engram lists, if the layer reads a table.
    pub engram: Option<usize>,
}

impl Config {
    /// The plan of backbone layer `l`.
    pub fn layer(&self, l: usize) -> LayerPlan {
        assert!(l < self.num_hidden_layers, "layer {l} of {}", self.num_hidden_layers);
        let ratio = self.compress_ratios[l];
        let last = |ids: &[usize]| ids.iter().copied().rfind(|s| *s <= l).filter(|_| ratio > 0);
        let (kv_source, index_source) = (last(&self.kv_source_layer_ids), last(&self.index_source_layer_ids));
        let role = match (kv_source, index_source) {
            (None, _) | (_, None) => Role::Window,
            (Some(s), _) if s == l => Role::Full,
            (_, Some(s)) if s == l => Role::Reindex,
            _ => Role::Reuse,
        };
        LayerPlan {
            ratio,
            role,
            kv_source,
            index_source,
            candidate_source: l == self.candidate_source_layer_id,
            engram: self.engram.layer_ids.iter().position(|e| *e == l),
        }
    }

    /// All rules between fields; the error is a sentence without the file's name.
    pub(super) fn check(&self) -> Result<(), String> {
        self.check_shapes()?;
        self.check_schedule()?;
        self.check_tokens()?;
        self.check_dspark()?;
        self.check_vision()?;
        self.check_engram()
    }

    fn check_shapes(&self) -> Result<(), String> {
        let (rope, heads, groups) = (self.qk_rope_head_dim, self.num_attention_heads, self.o_groups);
        if rope > self.head_dim {
            return Err(format!("qk_rope_head_dim {rope} is more than head_dim {}", self.head_dim));
        }
        if rope > self.index_head_dim {
            return Err(format!(
                "qk_rope_head_dim {rope} is more than index_head_dim {}",
                self.index_head_dim
            ));
        }
        if !heads.is_multiple_of(groups) {
            return Err(format!("o_groups {groups} does not divide num_attention_heads {heads}"));
        }
        at_most("num_experts_per_tok", self.num_experts_per_tok, "n_routed_experts", self.n_routed_experts)?;
        if self.yarn.beta_fast <= self.yarn.beta_slow {
            return Err(format!(
                "rope_scaling.beta_fast {} is not more than beta_slow {}",
                self.yarn.beta_fast, self.yarn.beta_slow
            ));
        }
        Ok(())
    }

    fn check_schedule(&self) -> Result<(), String> {
        let layers = self.num_hidden_layers;
        let want = layers + self.dspark.stages;
        if self.compress_ratios.len() != want {
            return Err(format!(
                "compress_ratios has {} entries; num_hidden_layers {layers} and num_nextn_predict_layers {} need {want}",
                self.compress_ratios.len(),
                self.dspark.stages
            ));
        }
        if let Some(i) = (layers..want).find(|i| self.compress_ratios[*i] != 0) {
            return Err(format!(
                "compress_ratios[{i}] is {}; draft stages have ratio 0",
                self.compress_ratios[i]
            ));
        }
        let lists = [
            ("kv_source_layer_ids", &self.kv_source_layer_ids),
            ("index_source_layer_ids", &self.index_source_layer_ids),
        ];
        for (name, ids) in lists {
            ascending(name, ids, layers)?;
            if let Some(l) = ids.iter().find(|l| self.compress_ratios[**l] == 0) {
                return Err(format!("{name} names layer {l}, whose compress_ratios entry is 0"));
            }
        }
        let candidate = self.candidate_source_layer_id;
        if !self.kv_source_layer_ids.contains(&candidate) || !self.index_source_layer_ids.contains(&candidate)
        {
            return Err(format!(
                "candidate_source_layer_id {candidate} is not in both kv_source_layer_ids and index_source_layer_ids"
            ));
        }
        if self.compress_ratios[candidate] != 1 {
            return Err(format!(
                "candidate_source_layer_id {candidate} has ratio {}; candidates need ratio 1",
                self.compress_ratios[candidate]
            ));
        }
        for l in &self.kv_source_layer_ids {
            if !self.index_source_layer_ids.contains(l) {
                return Err(format!(
                    "kv_source_layer_ids names layer {l}, which index_source_layer_ids lacks"
                ));
            }
            if *l > candidate {
                return Err(format!(
                    "kv_source_layer_ids names layer {l} after candidate_source_layer_id {candidate}"
                ));
            }
        }
        for l in &self.index_source_layer_ids {
            if !self.kv_source_layer_ids.contains(l) && *l < candidate {
                return Err(format!(
                    "index_source_layer_ids names layer {l}, which has no entries of its own and comes before candidate_source_layer_id {candidate}"
                ));
            }
        }
        for (l, ratio) in self.compress_ratios.iter().copied().enumerate().filter(|(_, r)| *r > 0) {
            for (name, ids) in lists {
                let Some(s) = ids.iter().copied().rfind(|s| *s <= l) else {
                    return Err(format!("{name} has no source at or before layer {l} of ratio {ratio}"));
                };
                if self.compress_ratios[s] != ratio {
                    return Err(format!(
                        "{name}: layer {l} of ratio {ratio} would read layer {s} of ratio {}",
                        self.compress_ratios[s]
                    ));
                }
            }
        }
        Ok(())
    }

    fn check_tokens(&self) -> Result<(), String> {
        let mut ids = vec![
            ("bos_token_id", self.bos_token_id),
            ("eos_token_id", self.eos_token_id),
            ("pad_token_id", self.pad_token_id),
            ("image_token_id", self.image_token_id),
            ("engram_pad_token_id", self.engram.pad_token_id),
        ];
        if self.dspark.stages > 0 {
            ids.push(("dspark_noise_token_id", self.dspark.noise_token_id));
        }
        for (name, id) in ids {
            if id as usize >= self.vocab_size {
                return Err(format!("{name} {id} is not below vocab_size {}", self.vocab_size));
            }
        }
        at_most(
            "engram_compressed_vocab_size",
            self.engram.compressed_vocab_size,
            "vocab_size",
            self.vocab_size,
        )
    }

    fn check_dspark(&self) -> Result<(), String> {
        let d = &self.dspark;
        if d.stages == 0 {
            return Ok(());
        }
        for (name, n) in [
            ("dspark_block_size", d.block_size),
            ("dspark_markov_rank", d.markov_rank),
            ("dspark_n_routed_experts", d.n_routed_experts),
            ("dspark_num_experts_per_tok", d.num_experts_per_tok),
            ("dspark_target_layer_ids", d.target_layer_ids.len()),
        ] {
            if n == 0 {
                return Err(format!("{name} is empty or 0 where num_nextn_predict_layers is {}", d.stages));
            }
        }
        ascending("dspark_target_layer_ids", &d.target_layer_ids, self.num_hidden_layers)?;
        at_most(
            "dspark_num_experts_per_tok",
            d.num_experts_per_tok,
            "dspark_n_routed_experts",
            d.n_routed_experts,
        )
    }

    fn check_vision(&self) -> Result<(), String> {
        let v = &self.vision;
        // Two axes, and half-split pairs within each.
        if v.num_hidden_layers > 0 && !v.hidden_size.is_multiple_of(4 * v.num_attention_heads) {
            return Err(format!(
                "vision_config.hidden_size {} is not a multiple of 4 times num_attention_heads {}",
                v.hidden_size, v.num_attention_heads
            ));
        }
        Ok(())
    }

    fn check_engram(&self) -> Result<(), String> {
        let e = &self.engram;
        ascending("engram_layer_ids", &e.layer_ids, self.num_hidden_layers)?;
        if e.num_embeddings.len() != e.layer_ids.len() {
            return Err(format!(
                "engram_num_embeddings has {} entries where engram_layer_ids has {}",
                e.num_embeddings.len(),
                e.layer_ids.len()
            ));
        }
        // A prime search is real work: ask it of no more layers than any model has.
        at_most("engram_layer_ids: number of layers", e.layer_ids.len(), "the limit", 16)?;
        for (k, primes) in self.all_engram_primes().iter().enumerate() {
            let sum: u64 = primes.iter().sum();
            if sum != e.num_embeddings[k] as u64 {
                return Err(format!(
                    "engram_num_embeddings[{k}] is {}; the hash columns of layer {} have {sum} rows",
                    e.num_embeddings[k], e.layer_ids[k]
                ));
            }
        }
        Ok(())
    }
}

fn at_most(name: &str, n: usize, limit_name: &str, limit: usize) -> Result<(), String> {
    if n <= limit { Ok(()) } else { Err(format!("{name} {n} is more than {limit_name} {limit}")) }
}

/// Layer ids that strictly ascend and exist.
fn ascending(name: &str, ids: &[usize], layers: usize) -> Result<(), String> {
    if let Some(w) = ids.windows(2).find(|w| w[0] >= w[1]) {
        return Err(format!("{name} does not ascend: {} is followed by {}", w[0], w[1]));
    }
    match ids.last() {
        Some(l) if *l >= layers => Err(format!("{name} names layer {l}; the last layer is {}", layers - 1)),
        _ => Ok(()),
    }
}
