//! What a checkpoint, or a configuration alone, amounts to: the report of `hallmark inspect`.

use std::fmt;

use serde::Serialize;

use crate::{Checkpoint, Config, Dtype, Form, Group, LayerPlan};

/// Tensors and bytes of one group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GroupSum {
    /// The group.
    pub group: Group,
    /// Tensors, scales included.
    pub tensors: u64,
    /// Logical values, scales excluded.
    pub parameters: u64,
    /// Stored bytes.
    pub bytes: u64,
}

/// Weights of one group in one form.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FormSum {
    /// The group.
    pub group: Group,
    /// The form; for EXL3 with rate and codebook.
    pub form: String,
    /// Weights, each with its scales; for EXL3 layers.
    pub weights: u64,
    /// Logical values.
    pub parameters: u64,
    /// Stored bytes, scales and markers included.
    pub bytes: u64,
}

/// Tensors and bytes of one stored type.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DtypeSum {
    /// The type.
    pub dtype: Dtype,
    /// Tensors.
    pub tensors: u64,
    /// Stored elements; one I8 holds two fp4 values.
    pub elements: u64,
    /// Stored bytes.
    pub bytes: u64,
}

/// One row of the layer schedule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LayerRow {
    /// Layer id.
    pub layer: usize,
    /// Its plan.
    #[serde(flatten)]
    pub plan: LayerPlan,
}

/// One shard file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ShardSum {
    /// File name.
    pub file: String,
    /// Tensors.
    pub tensors: u64,
    /// Bytes of the whole file.
    pub bytes: u64,
}

/// The report. Prints as tables; serialises as one JSON object.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Folder, or the configuration file.
    pub location: String,
    /// The folder that the Engram tables are taken from, where it is another one.
    pub engram_from: Option<String>,
    /// All tensors.
    pub tensors: u64,
    /// Logical values of all tensors but scales.
    pub parameters: u64,
    /// All stored bytes.
    pub bytes: u64,
    /// Groups that are not empty, in report order.
    pub groups: Vec<GroupSum>,
    /// Stored types that occur.
    pub dtypes: Vec<DtypeSum>,
    /// Forms of the weights by group; empty for a configuration alone.
    pub forms: Vec<FormSum>,
    /// Groups that the configuration implies and the folder lacks.
    pub missing: Vec<Group>,
    /// Shards; empty for a configuration alone.
    pub shards: Vec<ShardSum>,
    /// Tensors that are copied at load because of their alignment; 0 for a configuration alone.
    pub misaligned: usize,
    /// The layer schedule.
    pub layers: Vec<LayerRow>,
    /// The configuration.
    pub config: Config,
}

impl Summary {
    /// The report of what a configuration implies, without any weight.
    pub fn from_config(config: &Config, location: &str) -> Self {
        let mut out = Self::empty(config, location.into());
        for t in config.inventory() {
            let elements = t.shape.iter().map(|d| *d as u64).product();
            out.count(t.group, t.dtype, elements);
        }
        out
    }

    fn empty(config: &Config, location: String) -> Self {
        let layers = (0..config.num_hidden_layers)
            .map(|layer| LayerRow { layer, plan: config.layer(layer) })
            .collect();
        Self {
            location,
            engram_from: None,
            tensors: 0,
            parameters: 0,
            bytes: 0,
            groups: Vec::new(),
            dtypes: Vec::new(),
            forms: Vec::new(),
            missing: Vec::new(),
            shards: Vec::new(),
            misaligned: 0,
            layers,
            config: config.clone(),
        }
    }

    fn count(&mut self, group: Group, dtype: Dtype, elements: u64) {
        let bytes = elements * dtype.size() as u64;
        let parameters = match dtype {
            // What belongs to EXL3 layers is counted by layer.
            Dtype::E8m0 | Dtype::I16 | Dtype::F16 | Dtype::I32 => 0,
            Dtype::I8 => 2 * elements,
            _ => elements,
        };
        self.tensors += 1;
        self.parameters += parameters;
        self.bytes += bytes;
        let at = self.groups.binary_search_by_key(&group, |g| g.group).unwrap_or_else(|at| {
            self.groups.insert(at, GroupSum { group, tensors: 0, parameters: 0, bytes: 0 });
            at
        });
        let g = &mut self.groups[at];
        (g.tensors, g.parameters, g.bytes) = (g.tensors + 1, g.parameters + parameters, g.bytes + bytes);
        let at = self.dtypes.binary_search_by_key(&dtype, |d| d.dtype).unwrap_or_else(|at| {
            self.dtypes.insert(at, DtypeSum { dtype, tensors: 0, elements: 0, bytes: 0 });
            at
        });
        let d = &mut self.dtypes[at];
        (d.tensors, d.elements, d.bytes) = (d.tensors + 1, d.elements + elements, d.bytes + bytes);
    }

    /// Stored bytes of one group.
    pub fn group_bytes(&self, group: Group) -> u64 {
        self.groups.iter().find(|g| g.group == group).map_or(0, |g| g.bytes)
    }
}

impl Checkpoint {
    fn form_sums(&self) -> Vec<FormSum> {
        let mut sums = std::collections::BTreeMap::new();
        let mut add = |group: Group, form: String, parameters: usize, bytes: u64| {
            let sum = sums.entry((group, form.clone())).or_insert(FormSum {
                group,
                form,
                weights: 0,
                parameters: 0,
                bytes: 0,
            });
            sum.weights += 1;
            sum.parameters += parameters as u64;
            sum.bytes += bytes;
        };
        for module in self.exl3.values() {
            for layer in &module.layers {
                let form = format!("exl3 {} {}", layer.rate, layer.codebook.name());
                add(module.group, form, layer.rows * module.cols, self.exl3_bytes(layer));
            }
        }
        for (name, e) in &self.tensors {
            let scale = |module: &str| self.tensors.get(&format!("{module}.scale"));
            let scale = name.strip_suffix(".weight").and_then(scale);
            let elements = e.len / e.dtype.size();
            let (form, parameters) = match (e.dtype, scale) {
                (Dtype::F32, _) => (Form::F32, elements),
                (Dtype::Bf16, _) => (Form::Bf16, elements),
                (Dtype::I8, Some(_)) => (Form::Fp4Row32, 2 * elements),
                (Dtype::E4m3, Some(s)) if s.shape.first() == e.shape.first() => (Form::Fp8Row32, elements),
                (Dtype::E4m3, Some(_)) => (Form::Fp8Block32, elements),
                _ => continue,
            };
            let bytes = e.len + scale.map_or(0, |s| s.len);
            add(e.group, form.name().into(), parameters, bytes as u64);
        }
        sums.into_values().collect()
    }

    /// The report of this folder.
    pub fn summary(&self) -> Summary {
        let config = self.config();
        let mut out = Summary::empty(config, self.location());
        for t in self.tensors() {
            out.count(t.group, t.dtype, t.len / t.dtype.size() as u64);
        }
        for module in self.exl3.values() {
            let parameters = (module.rows * module.cols) as u64;
            out.parameters += parameters;
            out.groups
                .iter_mut()
                .filter(|g| g.group == module.group)
                .for_each(|g| g.parameters += parameters);
        }
        out.forms = self.form_sums();
        if config.dspark.stages > 0 && !self.has_dspark() {
            out.missing.push(Group::Dspark);
        }
        if config.vision.num_hidden_layers > 0 && !self.has_vision() {
            out.missing.extend([Group::Vision, Group::ImageMarks]);
        }
        out.engram_from = self.engram_location();
        out.shards = self.shard_sums();
        out.misaligned = self.misaligned();
        out
    }
}

/// Digits in groups of three.
fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let c = &self.config;
        writeln!(f, "{}", self.location)?;
        if let Some(folder) = &self.engram_from {
            writeln!(f, "Engram tables from {folder}")?;
        }
        writeln!(
            f,
            "DeepSeek-V4.1: {} layers, hidden {}, {} heads of {}, {} experts top {}, vocabulary {}, context {}",
            c.num_hidden_layers,
            c.hidden_size,
            c.num_attention_heads,
            c.head_dim,
            c.n_routed_experts,
            c.num_experts_per_tok,
            c.vocab_size,
            c.max_position_embeddings
        )?;
        writeln!(
            f,
            "{} tensors, {} bytes, {} parameters",
            grouped(self.tensors),
            grouped(self.bytes),
            grouped(self.parameters)
        )?;
        writeln!(f, "\n{:<16}{:>10}{:>22}{:>22}", "group", "tensors", "parameters", "bytes")?;
        for g in &self.groups {
            let (n, p, b) = (grouped(g.tensors), grouped(g.parameters), grouped(g.bytes));
            writeln!(f, "{:<16}{n:>10}{p:>22}{b:>22}", g.group.name())?;
        }
        for g in &self.missing {
            writeln!(f, "{:<16}{:>10}", g.name(), "absent")?;
        }
        writeln!(f, "\n{:<16}{:>10}{:>22}{:>22}", "type", "tensors", "elements", "bytes")?;
        for d in &self.dtypes {
            let (n, e, b) = (grouped(d.tensors), grouped(d.elements), grouped(d.bytes));
            writeln!(f, "{:<16}{n:>10}{e:>22}{b:>22}", d.dtype.name())?;
        }
        if self.config.quantization.exl3 {
            writeln!(
                f,
                "\n{:<16}{:<16}{:>10}{:>22}{:>22}{:>8}",
                "group", "form", "weights", "parameters", "bytes", "bits"
            )?;
            for s in &self.forms {
                let (n, p, b) = (grouped(s.weights), grouped(s.parameters), grouped(s.bytes));
                let bits = s.bytes as f64 * 8.0 / s.parameters as f64;
                writeln!(f, "{:<16}{:<16}{n:>10}{p:>22}{b:>22}{bits:>8.3}", s.group.name(), s.form)?;
            }
        }
        if !self.shards.is_empty() {
            writeln!(f, "\n{:<48}{:>22}", "shard", "bytes")?;
            for s in &self.shards {
                writeln!(f, "{:<48}{:>22}", s.file, grouped(s.bytes))?;
            }
            writeln!(f, "{} tensors lie off a multiple of 16 bytes and are copied at load", self.misaligned)?;
        }
        writeln!(
            f,
            "\n{:<10}{:>6}  {:<10}{:>8}{:>12}  notes",
            "layers", "ratio", "role", "kv from", "top-k from"
        )?;
        for run in self.layers.chunk_by(same_row) {
            let (first, last) = (&run[0], &run[run.len() - 1]);
            let span = match run.len() {
                1 => first.layer.to_string(),
                _ => format!("{}-{}", first.layer, last.layer),
            };
            let p = &first.plan;
            let from = |s: Option<usize>| s.map_or("-".into(), |s| s.to_string());
            let mut notes = Vec::new();
            if p.candidate_source {
                notes.push("candidates".to_string());
            }
            if let Some(k) = p.engram {
                notes.push(format!("engram {} rows", grouped(c.engram.num_embeddings[k] as u64)));
            }
            let role = format!("{:?}", p.role).to_lowercase();
            let row = format!(
                "{span:<10}{:>6}  {role:<10}{:>8}{:>12}  {}",
                p.ratio,
                from(p.kv_source),
                from(p.index_source),
                notes.join(", ")
            );
            writeln!(f, "{}", row.trim_end())?;
        }
        Ok(())
    }
}

/// Whether two layers share a row of the table.
fn same_row(a: &LayerRow, b: &LayerRow) -> bool {
    a.plan == b.plan
}
