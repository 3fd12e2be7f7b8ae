//! Events to the terminal: the answer on standard output, reasoning apart from it on standard error.

use std::io::{IsTerminal, Write, stderr, stdout};

use serde_json::{Value, json};
use text::{Event, Message, MessageCall};

use crate::failure::{Failure, output};

/// Prints an answer as it comes.
pub struct Printer {
    dim: bool,
    reasoning: bool,
    answered: bool,
    failed: Option<Failure>,
}

impl Printer {
    /// A printer for one answer.
    pub fn new() -> Self {
        Self { dim: stderr().is_terminal(), reasoning: false, answered: false, failed: None }
    }

    /// Whether nobody reads any more.
    pub fn failed(&self) -> bool {
        self.failed.is_some()
    }

    /// Prints one event; calls wait for [`Printer::finish`], where their arguments are complete.
    pub fn event(&mut self, event: &Event) {
        match event {
            Event::Reasoning(piece) => {
                let mut err = stderr().lock();
                if !self.reasoning && self.dim {
                    let _ = write!(err, "\x1b[2m");
                }
                self.reasoning = true;
                let _ = write!(err, "{}", piece.text);
                let _ = err.flush();
            }
            Event::Content(piece) => {
                self.close_reasoning();
                self.answered = true;
                self.out(&piece.text);
            }
            Event::CallOpened { .. } | Event::Arguments { .. } => self.close_reasoning(),
        }
    }

    /// Ends the answer: its calls as JSON lines, and a line end.
    ///
    /// # Errors
    /// A failed write of this or an earlier piece.
    pub fn finish(&mut self, message: &Message) -> Result<(), Failure> {
        self.close_reasoning();
        if self.answered && !message.content.ends_with('\n') {
            self.out("\n");
        }
        for call in &message.tool_calls {
            self.out(&format!("{}\n", call_json(call)));
        }
        self.failed.take().map_or(Ok(()), Err)
    }

    fn close_reasoning(&mut self) {
        if std::mem::take(&mut self.reasoning) {
            let mut err = stderr().lock();
            let _ = writeln!(err, "{}\n", if self.dim { "\x1b[0m" } else { "" });
        }
    }

    fn out(&mut self, text: &str) {
        let mut out = stdout().lock();
        if let Err(e) = out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            self.failed.get_or_insert(output(e));
        }
    }
}

/// A call as JSON; arguments that are not JSON (an answer cut short) stay a string.
pub fn call_json(call: &MessageCall) -> Value {
    let arguments =
        serde_json::from_str(&call.arguments).unwrap_or_else(|_| Value::String(call.arguments.clone()));
    json!({ "id": call.id, "name": call.name, "arguments": arguments })
}

/// Prints one JSON document.
///
/// # Errors
/// A failed write.
pub fn document(value: &impl serde::Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(value).map_err(|e| Failure::Io(format!("writing JSON: {e}")))?;
    line(&text)
}

/// Prints one line of results.
///
/// # Errors
/// A failed write.
pub fn line(text: &str) -> Result<(), Failure> {
    writeln!(stdout().lock(), "{text}").map_err(output)
}
