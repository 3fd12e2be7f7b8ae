//! Spellings of the added tokens that the protocol uses (spec section 2.3). The bars are U+FF5C, the block U+2581.

/// Begins every prompt.
pub const BOS: &str = "<｜begin▁of▁sentence｜>";
/// Ends an assistant turn; the only token that stops generation.
pub const EOS: &str = "<｜end▁of▁sentence｜>";
/// Begins a system message.
pub const SYSTEM: &str = "<｜System｜>";
/// Begins a user turn.
pub const USER: &str = "<｜User｜>";
/// Begins an assistant turn.
pub const ASSISTANT: &str = "<｜Assistant｜>";
/// Begins a reminder.
pub const REMINDER: &str = "<｜latest_reminder｜>";
/// Opens the reasoning.
pub const THINK: &str = "<think>";
/// Closes the reasoning.
pub const THINK_END: &str = "</think>";
/// Stands in every tag of a tool call; the angle brackets around it are ordinary text.
pub const DSML: &str = "｜DSML｜";
/// Stands for one image.
pub const IMAGE: &str = "<｜deepseek_image｜>";

/// The grounding tokens: special in assistant text, plain everywhere else.
pub const GROUNDING: [&str; 8] = [
    "<｜ref｜>",
    "<｜/ref｜>",
    "<｜box｜>",
    "<｜/box｜>",
    "<｜point｜>",
    "<｜/point｜>",
    "<｜polygon｜>",
    "<｜/polygon｜>",
];
