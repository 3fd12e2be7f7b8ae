//! The fixed texts of a prompt.

use crate::Segment::{self, Plain, Special};
use crate::special::{DSML, THINK, THINK_END};

/// How tools are called; one line per tool follows, then [`TOOLS_END`].
pub(crate) const TOOLS: &[Segment<'static>] = &[
    Plain(
        "\n\n## Tools\n\nYou have access to a set of tools to help answer the user's question. \
         You can invoke tools by writing a \"<",
    ),
    Special(DSML),
    Plain(" calls>\" block like the following:\n\n<"),
    Special(DSML),
    Plain(" calls>\n<"),
    Special(DSML),
    Plain(" invoke name=\"$TOOL_NAME\">\n<"),
    Special(DSML),
    Plain(" parameter name=\"$PARAMETER_NAME\" string=\"true|false\">$PARAMETER_VALUE</"),
    Special(DSML),
    Plain(" parameter>\n...\n</"),
    Special(DSML),
    Plain(" invoke>\n<"),
    Special(DSML),
    Plain(" invoke name=\"$TOOL_NAME2\">\n...\n</"),
    Special(DSML),
    Plain(" invoke>\n</"),
    Special(DSML),
    Plain(
        " calls>\n\nString parameters should be specified as is and set `string=\"true\"`. \
         For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set \
         `string=\"false\"`.\n\nIf thinking_mode is enabled (triggered by ",
    ),
    Special(THINK),
    Plain("), you MUST output your complete reasoning inside "),
    Special(THINK),
    Plain("..."),
    Special(THINK_END),
    Plain(" BEFORE any tool calls or final response.\n\nOtherwise, output directly after "),
    Special(THINK_END),
    Plain(" with tool calls or final response.\n\n### Available Tool Schemas\n\n"),
];

/// What follows the last tool.
pub(crate) const TOOLS_END: &str =
    "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n";

/// Before the tools that a system message adds.
pub(crate) const UPDATED_TOOLS: &str = "\n\n### Updated Tool Schemas\n\n";

/// Before the schema of the answer.
pub(crate) const RESPONSE_FORMAT: &str =
    "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n";

/// The schema stated for `json_object`.
pub(crate) const JSON_OBJECT: &str = "{\"type\": \"json_object\"}";

/// Before and after the reasoning budget.
pub(crate) const EFFORT: [&str; 2] =
    ["Reasoning Effort: ", " (range 1-100, the higher the value, the more thorough the reasoning)\n\n"];

/// Around the result of a tool.
pub(crate) const TOOL_RESULT: [&str; 2] = ["<tool_result>", "</tool_result>"];

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn texts_of_the_fixture() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/encoding/templates.json");
        let given: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let mut tools: Vec<Value> = TOOLS
            .iter()
            .map(|s| match s {
                Plain(text) => json!({ "plain": text }),
                Special(text) => json!({ "special": text }),
            })
            .collect();
        tools.push(json!({"slot": "tool_schemas"}));
        tools.push(json!({"plain": TOOLS_END}));
        let ours = json!({
            "tool_prompt_segments": tools,
            "effort_line": {"before": EFFORT[0], "after": EFFORT[1], "budgets": {
                "low": crate::Effort::Low.budget(),
                "high": crate::Effort::High.budget(),
                "max": crate::Effort::Max.budget(),
            }},
            "response_format_prefix": RESPONSE_FORMAT,
            "updated_tools_prefix": UPDATED_TOOLS,
            "tool_result": TOOL_RESULT,
            "json_object_schema": JSON_OBJECT,
            "calls_open_for_required": [{"plain": "\n\n<"}, {"special": DSML}, {"plain": " calls>\n"}],
        });
        assert_eq!(ours, given);
    }
}
