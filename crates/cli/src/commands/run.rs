//! `hallmark run`.

use std::io::Read;

use engine::{Answer, Loaded, Prompt};
use serde_json::{Value, json};
use text::{Api, Options, Request, SamplingParams, Think};

use crate::{
    args::Run,
    commands::admission::Standing,
    failure::Failure,
    interrupt::Interrupt,
    render::{self, Printer},
};

/// Largest request body that is read.
const MAX_BODY: u64 = 64 << 20;

pub fn run(args: &Run) -> Result<(), Failure> {
    let request = request(args)?;
    let (loaded, standing) = args.admission.load(&args.model)?;
    let context = args.sampling.context(&loaded);
    let mut prompt = match request {
        Ask::Request(request) => Prompt::from_request(&request, &loaded, context, args.sampling.max_tokens)?,
        Ask::Ids(ids) => {
            let rest = args.sampling.max_tokens.unwrap_or(context.saturating_sub(ids.len()));
            Prompt::from_ids(ids, SamplingParams::default(), rest)
        }
    };
    args.sampling.apply(&mut prompt.sampling);
    let mut session = args.sessions.open(&loaded, context)?;
    let (interrupt, mut printer) = (Interrupt::install(), Printer::new());
    let printer_cell = std::cell::RefCell::new(&mut printer);
    let answer = engine::answer(
        &loaded,
        &mut *session,
        &prompt,
        &mut |event| {
            if !args.json {
                printer_cell.borrow_mut().event(event);
            }
        },
        &|| interrupt.pressed() || printer_cell.borrow().failed(),
    )?;
    if args.json {
        return render::document(&document(&answer, &loaded, &standing));
    }
    printer.finish(&answer.message)?;
    eprintln!("{}", statistics(&answer));
    Ok(())
}

/// What the command line asks.
enum Ask {
    Request(Box<Request>),
    Ids(Vec<u32>),
}

fn request(args: &Run) -> Result<Ask, Failure> {
    let level = args.sampling.level();
    if let Some(ids) = &args.prompt_ids {
        return Ok(Ask::Ids(ids.clone()));
    }
    if let Some(text) = &args.prompt {
        let request = match args.raw {
            true => Request::from_raw(text),
            false => Request::from_text(text, level.unwrap_or(Think::On(text::Effort::High))),
        };
        return Ok(Ask::Request(Box::new(request)));
    }
    let Some(file) = &args.messages else {
        return Err(Failure::Usage("one of --prompt, --messages and --prompt-ids is needed".into()));
    };
    let name = file.display();
    let mut body = Vec::new();
    let read = if file.as_os_str() == "-" {
        std::io::stdin().take(MAX_BODY + 1).read_to_end(&mut body)
    } else {
        std::fs::File::open(file).and_then(|f| f.take(MAX_BODY + 1).read_to_end(&mut body))
    };
    read.map_err(|e| Failure::Input(format!("{name}: {e}")))?;
    if body.len() as u64 > MAX_BODY {
        return Err(Failure::Input(format!("{name}: a request of more than {MAX_BODY} bytes is refused")));
    }
    let options = Options { think: level, ..Options::default() };
    let request = Request::from_json(Api::Chat, &body, &options);
    Ok(Ask::Request(Box::new(request.map_err(|e| Failure::Input(format!("{name}: {e}")))?)))
}

fn statistics(a: &Answer) -> String {
    let reasoning = match a.usage.reasoning_tokens {
        0 => String::new(),
        n => format!(" ({n} reasoning)"),
    };
    let kept = match a.usage.cached_tokens {
        0 => String::new(),
        n => format!(" ({n} kept from before)"),
    };
    let drafts = match a.drafts.drafted {
        0 => String::new(),
        n => format!(", {} of {n} drafts right", a.drafts.accepted),
    };
    format!(
        "\n{} prompt tokens{kept}, {:.0} tok/s; {} answer tokens{reasoning}, {:.0} tok/s{drafts}; seed {}",
        a.usage.prompt_tokens,
        a.timing.prefill_tokens_per_s,
        a.usage.completion_tokens,
        a.timing.decode_tokens_per_s,
        a.seed,
    )
}

/// What the plan says of this run, and the most that the process ever had in memory.
fn memory(a: &Answer, loaded: &Loaded) -> Value {
    let state = engine::plan::state_bytes(&loaded.lm.layout(), a.usage.total_tokens);
    json!({ "weights": loaded.planned, "state": state, "used": engine::memory::used() })
}

fn document(a: &Answer, loaded: &Loaded, standing: &Standing) -> Value {
    json!({
        "prompt_ids": a.prompt_ids,
        "ids": a.ids,
        "text": a.text,
        "content": a.message.content,
        "reasoning": a.message.reasoning,
        "tool_calls": a.message.tool_calls.iter().map(render::call_json).collect::<Vec<_>>(),
        "finish_reason": a.message.finish_reason.map(text::FinishReason::as_str),
        "usage": a.usage,
        "timing": a.timing,
        "reuse": a.reuse,
        "drafts": a.drafts,
        "engram": loaded.lm.engram(),
        "memory": memory(a, loaded),
        "seed": a.seed,
        "device": loaded.lm.device(),
        "numerics": loaded.lm.mode(),
        "qualification": standing,
    })
}
