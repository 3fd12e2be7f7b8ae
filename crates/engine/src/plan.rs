//! What a checkpoint needs of a machine, before it is downloaded or loaded: bytes by part, the state at a context, and a
//! verdict for each machine.
//!
//! Bytes of weights and of the state are exact sums; what a step takes beside them is an estimate and says so.

use checkpoint::{Checkpoint, Config, Group, Role};
use exl3::Rate;
use model::Layout;
use serde::Serialize;

use crate::sequence::CHUNK;

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;
/// What the system of a machine with one memory keeps for itself and other programs.
const SYSTEM: u64 = 8 * GIB;
/// What a driver keeps of a GPU's own memory.
const DRIVER: u64 = GIB;

/// Stored bytes of the parts that are loaded or left out together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Parts {
    /// Token embedding: a row a token is read.
    pub embedding: u64,
    /// Output head.
    pub head: u64,
    /// All layers but their routed experts and Engram tables.
    pub dense: u64,
    /// Routed experts.
    pub experts: u64,
    /// Engram tables.
    pub engram: u64,
    /// Draft stages.
    pub dspark: u64,
    /// Vision tower and image marks, which are never loaded.
    pub vision: u64,
}

impl Parts {
    /// The parts that `config` implies in the released format, or with the routed experts as EXL3 of `bits` and all else
    /// as released.
    pub fn of_config(config: &Config, bits: Option<Rate>) -> Self {
        let mut parts = Self::default();
        for t in config.inventory() {
            let bytes = match (bits, t.group, t.linear) {
                (Some(rate), Group::RoutedExperts, Some([rows, cols])) => {
                    // Trellis words, and a half-precision sign and scale for every input and output.
                    (rows * cols * rate.half_bits() / 16 + 2 * (rows + cols)) as u64
                }
                (Some(_), Group::RoutedExperts, None) => 0,
                _ => t.bytes(),
            };
            parts.add(t.group, &t.name, bytes);
        }
        parts
    }

    /// The parts of a folder, from its headers.
    pub fn of_checkpoint(checkpoint: &Checkpoint) -> Self {
        let mut parts = Self::default();
        for t in checkpoint.tensors() {
            parts.add(t.group, t.name, t.len);
        }
        parts
    }

    fn add(&mut self, group: Group, name: &str, bytes: u64) {
        let part = match group {
            Group::Embedding if name.starts_with("embed") => &mut self.embedding,
            Group::Embedding => &mut self.head,
            Group::RoutedExperts => &mut self.experts,
            Group::EngramTable => &mut self.engram,
            Group::Dspark => &mut self.dspark,
            Group::Vision | Group::ImageMarks => &mut self.vision,
            Group::Norm
            | Group::Hyper
            | Group::Attention
            | Group::KvIndex
            | Group::Router
            | Group::SharedExperts
            | Group::Engram => &mut self.dense,
        };
        *part += bytes;
    }

    /// What is resident beside Engram tables and draft stages.
    pub fn text(&self) -> u64 {
        self.embedding + self.head + self.dense + self.experts
    }

    /// All bytes of the checkpoint.
    pub fn total(&self) -> u64 {
        self.text() + self.engram + self.dspark + self.vision
    }
}

/// A machine as a plan sees it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Machine {
    /// Name for the command line.
    pub name: &'static str,
    /// Words for people.
    pub title: &'static str,
    /// Bytes of memory: the one memory of a Mac, or that of each GPU.
    pub memory: u64,
    /// Bytes of one memory that the GPU may use as delivered.
    pub gpu_limit: Option<u64>,
    /// GPUs.
    pub gpus: u64,
    /// Read bandwidth in bytes a second, as the maker gives it.
    pub bandwidth: u64,
}

/// Machines with a name. A Mac's GPU may use three quarters of its memory as delivered.
pub const MACHINES: [Machine; 5] = [
    mac("m3-ultra-512", "Mac, M3 Ultra, 512 GB", 512, 819),
    mac("m3-ultra-256", "Mac, M3 Ultra, 256 GB", 256, 819),
    mac("m5-max-128", "Mac, M5 Max, 128 GB", 128, 614),
    gpu("h200", "NVIDIA H200, 141 GB", 141_000_000_000, 1, 4800),
    gpu("2x-rtx-pro-6000", "2 x RTX PRO 6000, 96 GB each", 96 * GIB, 2, 1792),
];

const fn mac(name: &'static str, title: &'static str, gib: u64, gb_s: u64) -> Machine {
    let memory = gib * GIB;
    Machine { name, title, memory, gpu_limit: Some(memory / 4 * 3), gpus: 1, bandwidth: gb_s * 1_000_000_000 }
}

impl Machine {
    /// One that is in no table: one memory for all, of which the GPU may use three quarters as delivered.
    pub const fn asked(memory: u64, gb_s: u64) -> Self {
        let (gpu_limit, bandwidth) = (Some(memory / 4 * 3), gb_s * 1_000_000_000);
        Self { name: "asked", title: "one memory, as asked", memory, gpu_limit, gpus: 1, bandwidth }
    }
}

const fn gpu(name: &'static str, title: &'static str, memory: u64, gpus: u64, gb_s: u64) -> Machine {
    Machine { name, title, memory, gpu_limit: None, gpus, bandwidth: gb_s * 1_000_000_000 }
}

/// What runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Wish {
    /// Tokens of the longest conversation.
    pub context: usize,
    /// Whether the draft stages are loaded.
    pub drafts: bool,
}

/// Whether a machine has what a plan needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Verdict {
    /// As delivered.
    #[serde(rename = "FITS")]
    Fits,
    /// After the GPU's share of the memory is raised.
    #[serde(rename = "FITS AFTER")]
    FitsAfter,
    /// Not with this format and context.
    #[serde(rename = "DOES NOT FIT")]
    No,
    /// By bytes, in a way that hallmark does not run.
    #[serde(rename = "REFUSED")]
    Refused,
}

impl Verdict {
    /// The word that reports use.
    pub fn word(self) -> &'static str {
        match self {
            Verdict::Fits => "FITS",
            Verdict::FitsAfter => "FITS AFTER",
            Verdict::No => "DOES NOT FIT",
            Verdict::Refused => "REFUSED",
        }
    }
}

/// A verdict with what it means.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Finding {
    /// The machine.
    pub machine: Machine,
    /// The verdict.
    pub verdict: Verdict,
    /// What to do, or what would fit.
    pub how: String,
    /// Where the Engram tables are.
    pub engram: &'static str,
    /// Tokens a second that the machine's bandwidth allows at most, one conversation decoding at the full context.
    pub roof: f64,
}

/// The needs of one checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Plan {
    /// Stored bytes.
    pub parts: Parts,
    /// What was asked.
    pub wish: Wish,
    /// Bytes of long-range entries and index keys at the context.
    pub entries: u64,
    /// Bytes of windows and groups of two.
    pub windows: u64,
    /// Estimate of what a prefill step takes.
    pub transient: u64,
    /// Left free: 1 GiB and one part in a hundred.
    pub margin: u64,
    /// Bytes where the GPU reads: weights but Engram tables, state, step and margin.
    pub device: u64,
    /// Bytes read for a decoded token at the full context.
    pub read: u64,
    /// Each machine.
    pub machines: Vec<Finding>,
}

impl Plan {
    /// The plan for `parts` on `machines`. `lower` is whether fewer bits can be proposed.
    pub fn new(c: &Config, parts: Parts, wish: Wish, machines: &[Machine], lower: bool) -> Self {
        let layout = Layout::of(c, wish.drafts);
        let entries = layout.entry_bytes(0, wish.context) as u64;
        let windows = (layout.window_bytes(wish.context) + layout.group_bytes()) as u64;
        let transient = transient(c);
        let weights = parts.text() + if wish.drafts { parts.dspark } else { 0 };
        let margin = GIB + weights / 100;
        let device = weights + entries + windows + transient + margin;
        let read = parts.dense
            + parts.head
            + parts.experts / c.n_routed_experts as u64 * c.num_experts_per_tok as u64
            + state_read(c, &layout, wish.context);
        let mut plan =
            Self { parts, wish, entries, windows, transient, margin, device, read, machines: Vec::new() };
        plan.machines = machines.iter().map(|m| plan.find(c, m, lower)).collect();
        plan
    }

    fn find(&self, c: &Config, machine: &Machine, lower: bool) -> Finding {
        let roof = machine.bandwidth as f64 / self.read as f64;
        let finding =
            |verdict, how: String, engram| Finding { machine: machine.clone(), verdict, how, engram, roof };
        let Some(limit) = machine.gpu_limit else {
            let room = (machine.memory - DRIVER) * machine.gpus;
            let engram = "in the host's memory, or mapped from disk";
            const ONE: &str = "more than one GPU is not supported yet";
            return match (self.device <= room, machine.gpus) {
                (true, 1) => finding(Verdict::Fits, String::new(), engram),
                (true, _) => finding(Verdict::Refused, format!("by bytes it FITS; {ONE}"), engram),
                (false, 1) => finding(Verdict::No, self.instead(c, room, lower), engram),
                (false, _) => {
                    finding(Verdict::No, format!("{}; {ONE}", self.instead(c, room, lower)), engram)
                }
            };
        };
        let most = machine.memory.saturating_sub(SYSTEM);
        let engram = if self.device + self.parts.engram <= most {
            "in memory beside the GPU's share"
        } else {
            "from disk: --engram mmap or cache:SIZE"
        };
        if self.device <= limit {
            finding(Verdict::Fits, String::new(), engram)
        } else if self.device <= most {
            let how = format!("sudo sysctl iogpu.wired_limit_mb={}", self.device.div_ceil(MIB));
            finding(Verdict::FitsAfter, how, engram)
        } else {
            finding(Verdict::No, self.instead(c, most, lower), engram)
        }
    }

    /// What would fit into `room`.
    fn instead(&self, c: &Config, room: u64, lower: bool) -> String {
        let other = |parts: Parts, context: usize| {
            Plan::new(c, parts, Wish { context, ..self.wish }, &[], false).device <= room
        };
        let mut ways = Vec::new();
        let mut context = self.wish.context / 2;
        while context >= 1024 && !other(self.parts, context) {
            context /= 2;
        }
        if context >= 1024 {
            ways.push(format!("a context of {context} tokens"));
        }
        if lower {
            let fits = |rate: &Rate| other(Parts::of_config(c, Some(*rate)), self.wish.context);
            if let Some(rate) = Rate::ALL.into_iter().rev().find(fits) {
                ways.push(format!("experts in EXL3 of {} bits", rate.bits()));
            }
        }
        if ways.is_empty() {
            format!("{:.1} GB are needed, {:.1} GB are there", gb(self.device), gb(room))
        } else {
            format!("{} would", ways.join(" or "))
        }
    }

    /// Named byte counts in report order.
    pub fn rows(&self) -> Vec<(&'static str, u64)> {
        let p = &self.parts;
        let mut rows = vec![
            ("embedding", p.embedding),
            ("layers without experts", p.dense),
            ("routed experts", p.experts),
            ("head", p.head),
        ];
        if self.wish.drafts {
            rows.push(("draft stages", p.dspark));
        }
        rows.extend([
            ("state: entries", self.entries),
            ("state: windows", self.windows),
            ("a prefill step (estimate)", self.transient),
            ("margin", self.margin),
        ]);
        rows
    }
}

/// Decimal gigabytes.
pub fn gb(bytes: u64) -> f64 {
    bytes as f64 / 1e9
}

/// Activations of a prefill step: three copies of the streams, queries and attention results, the experts' rows.
pub fn transient(c: &Config) -> u64 {
    let streams = 3 * c.hc_mult * c.hidden_size;
    let attention = 2 * c.num_attention_heads * c.head_dim;
    let experts = c.num_experts_per_tok * (2 * c.hidden_size + 3 * c.moe_intermediate_size);
    (CHUNK * (streams + attention + experts) * size_of::<f32>()) as u64
}

/// Bytes of a state at `context` tokens [§6.3].
pub fn state_bytes(layout: &Layout, context: usize) -> u64 {
    layout.state_bytes(context) as u64
}

/// Bytes of the state that a decoded token reads [§7.1]: windows, chosen entries, index keys.
fn state_read(c: &Config, layout: &Layout, context: usize) -> u64 {
    let mut bytes = layout.layers * context.min(layout.window) * layout.ring_row;
    for l in 0..c.num_hidden_layers {
        let plan = c.layer(l);
        if plan.ratio == 0 {
            continue;
        }
        let entries = context / plan.ratio;
        bytes += entries.min(c.index_topk) * layout.kv_row;
        bytes += layout.key_row
            * match plan.role {
                Role::Full => entries,
                Role::Reindex => entries.min(c.candidate_topk_blocks * c.candidate_block_size),
                Role::Window | Role::Reuse => 0,
            };
    }
    bytes as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn released() -> Config {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/released/config.json");
        Config::load_file(std::path::Path::new(file)).unwrap()
    }

    fn plan(bits: Option<f64>, context: usize) -> Plan {
        let c = released();
        let bits = bits.map(|b| Rate::from_bits(b).unwrap());
        Plan::new(&c, Parts::of_config(&c, bits), Wish { context, drafts: false }, &MACHINES, true)
    }

    /// The figures of the specification: 510,286,023,000 bytes in all, 202,758,032,400 of Engram tables, 298.6 GB resident,
    /// 214.37, 180.40 and 146.43 GB with EXL3 experts.
    #[test]
    fn the_released_sizes_come_out_to_the_byte() {
        let p = plan(None, 1 << 20);
        assert_eq!((p.parts.total(), p.parts.engram), (510_286_023_000, 202_758_032_400));
        assert_eq!(p.entries, 890 << 20);
        assert_eq!(p.windows, 2_703_360 + 24_576);
        assert_eq!(format!("{:.1}", gb(p.parts.text())), "298.6");
        for (bits, want) in [(3.0, 214_374_118_848), (2.5, 180_400_256_448), (2.0, 146_426_394_048)] {
            assert_eq!(plan(Some(bits), 4096).parts.text(), want, "{bits} bits");
        }
        // Sign vectors of an expert of three matrices: a half-precision value an input and an output.
        let (c, signs) = (released(), 44_544);
        let words = |bits: u64| 3 * (c.hidden_size * c.moe_intermediate_size) as u64 * bits / 8;
        let experts = plan(Some(3.0), 4096).parts.experts;
        assert_eq!(experts, (c.num_hidden_layers * c.n_routed_experts) as u64 * (words(3) + signs));
        // Weights of a token: 13.035 GB native, 11.71 GB with experts of 3 bits and their sign vectors.
        let weights =
            |p: &Plan| gb(p.read - state_read(&released(), &Layout::of(&released(), false), p.wish.context));
        assert_eq!(format!("{:.2}", weights(&p)), "13.04");
        assert_eq!(format!("{:.2}", weights(&plan(Some(3.0), 4096))), "11.72");
    }

    /// Reads of the state at some contexts: windows 2.70 MB, entries 5.60 MB, keys 10.0 MB at 32k and 182.7 MB at 1M.
    #[test]
    fn the_state_is_read_as_the_specification_says() {
        let (c, layout) = (released(), Layout::of(&released(), false));
        let keys = |n: usize| (state_read(&c, &layout, n) - 40 * 128 * 528 - 38 * 512 * 288) as f64 / 1e6;
        assert_eq!(format!("{:.1} {:.1}", keys(32 << 10), keys(1 << 20)), "10.0 182.7");
    }

    const BESIDE: &str = "in memory beside the GPU's share";
    const DISK: &str = "from disk: --engram mmap or cache:SIZE";
    const HOST: &str = "in the host's memory, or mapped from disk";

    /// What a plan for one machine alone says of it.
    fn found(bits: Option<f64>, name: &str) -> (Verdict, String, &'static str) {
        let (c, wish) = (released(), Wish { context: 128 << 10, drafts: false });
        let machine = MACHINES.iter().find(|m| m.name == name).unwrap();
        let parts = Parts::of_config(&c, bits.map(|b| Rate::from_bits(b).unwrap()));
        let f = Plan::new(&c, parts, wish, std::slice::from_ref(machine), true).machines.remove(0);
        (f.verdict, f.how, f.engram)
    }

    /// The big Mac holds 3 bits within the 384 GiB that its GPU may use as delivered, and the tables outside of them.
    #[test]
    fn a_mac_of_512_gb_holds_three_bits_and_the_tables_beside() {
        let (p, big) = (plan(Some(3.0), 128 << 10), &MACHINES[0]);
        assert_eq!((big.memory, big.gpu_limit), (512 * GIB, Some(384 * GIB)));
        for bits in [None, Some(3.0), Some(2.5), Some(2.0)] {
            assert_eq!(found(bits, "m3-ultra-512"), (Verdict::Fits, String::new(), BESIDE), "{bits:?}");
        }
        // Inside the limit there is no room for the tables: they count against the memory alone.
        let native = plan(None, 128 << 10);
        assert!(native.device + native.parts.engram > 384 * GIB && p.device < 384 * GIB);
    }

    /// A Mac of 256 GB has no room for 203 GB of tables beside any of these, whatever its GPU may use.
    #[test]
    fn a_mac_of_256_gb_takes_the_tables_from_disk() {
        let p = plan(Some(3.0), 128 << 10);
        let how = format!("sudo sysctl iogpu.wired_limit_mb={}", p.device.div_ceil(MIB));
        assert_eq!(found(Some(3.0), "m3-ultra-256"), (Verdict::FitsAfter, how, DISK));
        for bits in [2.5, 2.0] {
            assert_eq!(found(Some(bits), "m3-ultra-256"), (Verdict::Fits, String::new(), DISK), "{bits}");
        }
        let how = "experts in EXL3 of 3.5 bits would";
        assert_eq!(found(None, "m3-ultra-256"), (Verdict::No, how.into(), DISK));
        // The command raises the limit to what is needed: with it the same plan fits as it is.
        let limit = p.device.div_ceil(MIB) * MIB;
        let raised = Machine { gpu_limit: Some(limit), ..MACHINES[1].clone() };
        assert_eq!(p.find(&released(), &raised, true).verdict, Verdict::Fits);
        let short = Machine { gpu_limit: Some(limit - MIB), ..raised };
        assert_eq!(p.find(&released(), &short, true).verdict, Verdict::FitsAfter);
    }

    #[test]
    fn small_machines_and_pairs_of_gpus_say_what_would_fit() {
        for bits in [None, Some(3.0), Some(2.0)] {
            for (machine, place) in [("m5-max-128", DISK), ("h200", HOST)] {
                let want = (Verdict::No, "experts in EXL3 of 1.5 bits would".to_owned(), place);
                assert_eq!(found(bits, machine), want, "{bits:?} on {machine}");
            }
        }
        let one = "more than one GPU is not supported yet";
        for bits in [2.5, 2.0] {
            let want = (Verdict::Refused, format!("by bytes it FITS; {one}"), HOST);
            assert_eq!(found(Some(bits), "2x-rtx-pro-6000"), want, "{bits}");
        }
        let want = (Verdict::No, format!("experts in EXL3 of 2.5 bits would; {one}"), HOST);
        assert_eq!(found(Some(3.0), "2x-rtx-pro-6000"), want);
    }

    /// [§7.1] gives the roofs of five bandwidths, for the weights alone: one token of context reads no more.
    #[test]
    fn the_roof_is_bandwidth_over_what_a_token_reads() {
        let (c, wish) = (released(), Wish { context: 1, drafts: false });
        let roof = |gb_s| {
            let machines = [Machine::asked(512 * GIB, gb_s)];
            Plan::new(&c, Parts::of_config(&c, None), wish, &machines, true).machines[0].roof
        };
        assert_eq!([100, 273].map(|b| format!("{:.1}", roof(b))), ["7.7", "20.9"]);
        assert_eq!([800, 3350, 4800].map(|b| format!("{:.0}", roof(b))), ["61", "257", "368"]);
        let p = plan(None, 128 << 10);
        for (f, gb_s) in p.machines.iter().zip([819, 819, 614, 4800, 1792]) {
            assert_eq!(f.roof, gb_s as f64 * 1e9 / p.read as f64, "{}", f.machine.name);
        }
    }
}
