//! `hallmark plan`.

use std::{fmt::Write as _, path::Path};

use checkpoint::{Checkpoint, Config};
use engine::{
    Device,
    plan::{MACHINES, Machine, Parts, Plan, Verdict, Wish, gb},
};

use crate::{args, commands::pull, demo, failure::Failure, render};

pub fn run(args: &args::Plan) -> Result<(), Failure> {
    let (config, parts) = match (&args.config, &args.model) {
        (Some(file), _) => {
            let config = Config::load_file(file)?;
            let parts = Parts::of_config(&config, args.bits);
            (config, parts)
        }
        (None, Some(model)) => match remote(model) {
            Some(name) => {
                let dir = tempfile::tempdir().map_err(|e| Failure::Io(format!("temporary folder: {e}")))?;
                pull::headers(name, dir.path())?;
                of(&Checkpoint::open_headers(dir.path())?)
            }
            None => of(&Checkpoint::open_headers(model)?),
        },
        (None, None) => of(&demo::open()?),
    };
    if args.context == 0 || args.context > config.max_position_embeddings {
        return Err(Failure::Usage(format!(
            "--context {}: the model takes 1 to {} tokens",
            args.context, config.max_position_embeddings
        )));
    }
    let wish = Wish { context: args.context, drafts: args.drafts == "on" };
    let plan = Plan::new(&config, parts, wish, &machines(args)?, args.config.is_some());
    if args.json { render::document(&plan) } else { render::line(report(&plan).trim_end()) }
}

/// The name of a repository, where no folder has it.
fn remote(model: &Path) -> Option<&str> {
    let name = model.to_str().filter(|n| n.contains('@'))?;
    (!model.exists()).then_some(name)
}

fn of(checkpoint: &Checkpoint) -> (Config, Parts) {
    (checkpoint.config().clone(), Parts::of_checkpoint(checkpoint))
}

fn machines(args: &args::Plan) -> Result<Vec<Machine>, Failure> {
    if let (Some(memory), Some(bandwidth)) = (args.memory, args.bandwidth) {
        return Ok(vec![Machine::asked(memory, bandwidth)]);
    }
    let mut machines = MACHINES.to_vec();
    if let Some(name) = &args.machine {
        machines.retain(|m| m.name == name);
        if machines.is_empty() {
            let names = MACHINES.map(|m| m.name).join(", ");
            return Err(Failure::Usage(format!("--machine {name}: known are {names}")));
        }
    }
    if let Some(gb_s) = args.bandwidth {
        machines.iter_mut().for_each(|m| m.bandwidth = gb_s * 1_000_000_000);
    }
    Ok(machines)
}

fn report(plan: &Plan) -> String {
    let mut out = String::new();
    let mut line = |text: String| {
        let _ = writeln!(out, "{text}"); // writing to a String can't fail
    };
    for (name, bytes) in plan.rows() {
        line(format!("{name:<28}{:>10.3} GB", gb(bytes)));
    }
    line(format!("{:<28}{:>10.3} GB", format!("needed at {} tokens", plan.wish.context), gb(plan.device)));
    match plan.parts.engram {
        0 => line("Engram tables are not in this folder".into()),
        bytes => line(format!("{:<28}{:>10.3} GB", "Engram tables, apart", gb(bytes))),
    }
    if plan.parts.vision > 0 {
        line(format!("{:<28}{:>10.3} GB", "vision, never loaded", gb(plan.parts.vision)));
    }
    line(format!("{:<28}{:>10.3} GB", "read for a decoded token", gb(plan.read)));
    line(String::new());
    for f in &plan.machines {
        let how = if f.how.is_empty() { String::new() } else { format!(": {}", f.how) };
        line(format!("{:<16} {} ({}){how}", f.machine.name, f.verdict.word(), f.machine.title));
        if f.verdict != Verdict::No {
            line(format!(
                "{:<16} Engram tables {}; at most {:.1} tok/s at {} GB/s",
                "",
                f.engram,
                f.roof,
                f.machine.bandwidth / 1_000_000_000
            ));
        }
    }
    line(String::new());
    let gpus = Device::gpus();
    let built =
        if gpus.is_empty() { "the CPU only".into() } else { format!("the CPU and {}", gpus.join(" and ")) };
    line(format!("Verdicts are about bytes, rates are roofs of bandwidth. This build computes on {built}."));
    out
}
