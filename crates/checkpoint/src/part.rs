//! Parts of a model that can be pulled alone, where whole shards allow it.

use std::{fmt, str::FromStr};

/// A part by the names of its tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// Everything but the other three.
    Text,
    /// The Engram tables.
    Engram,
    /// The draft stages.
    Dspark,
    /// The vision tower and the image marks.
    Vision,
}

impl Part {
    /// All parts.
    pub const ALL: [Part; 4] = [Part::Text, Part::Engram, Part::Dspark, Part::Vision];

    /// The part that a tensor belongs to.
    pub fn of(tensor: &str) -> Self {
        if tensor.starts_with("mtp.") {
            Part::Dspark
        } else if ["vision.", "aligner.", "image_"].iter().any(|p| tensor.starts_with(p)) {
            Part::Vision
        } else if tensor.contains(".engram.embed.") {
            Part::Engram
        } else {
            Part::Text
        }
    }

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Part::Text => "text",
            Part::Engram => "engram",
            Part::Dspark => "dspark",
            Part::Vision => "vision",
        }
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Part {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Part::ALL.into_iter().find(|p| p.name() == text);
        found.ok_or_else(|| format!("unknown part '{text}': use text, engram, dspark or vision"))
    }
}
