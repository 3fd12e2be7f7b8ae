//! The four words of a gate.

use serde::{Deserialize, Serialize};

/// What a gate, a check or a receipt says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Verdict {
    /// Ran in full, and every figure is within its limit.
    #[serde(rename = "PASS")]
    Pass,
    /// A figure is past its limit.
    #[serde(rename = "FAIL")]
    Fail,
    /// What ran passed, but a part did not run, or the tree was not clean.
    #[serde(rename = "PARTIAL")]
    Partial,
    /// Did not run. Never counts as passed.
    #[serde(rename = "NOT RUN")]
    NotRun,
}

impl Verdict {
    /// The word.
    pub fn word(self) -> &'static str {
        match self {
            Verdict::Pass => "PASS",
            Verdict::Fail => "FAIL",
            Verdict::Partial => "PARTIAL",
            Verdict::NotRun => "NOT RUN",
        }
    }

    /// The verdict over parts: one FAIL fails; PASS needs every part to pass; nothing that ran is NOT RUN.
    pub fn all(parts: impl IntoIterator<Item = Verdict>) -> Self {
        let (mut pass, mut other) = (false, false);
        for v in parts {
            match v {
                Verdict::Fail => return Verdict::Fail,
                Verdict::Pass => pass = true,
                Verdict::Partial => (pass, other) = (true, true),
                Verdict::NotRun => other = true,
            }
        }
        match (pass, other) {
            (true, false) => Verdict::Pass,
            (true, true) => Verdict::Partial,
            (false, _) => Verdict::NotRun,
        }
    }
}

impl From<bool> for Verdict {
    fn from(within: bool) -> Self {
        if within { Verdict::Pass } else { Verdict::Fail }
    }
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.word())
    }
}

#[cfg(test)]
mod tests {
    use super::Verdict::{self, *};

    #[test]
    fn skipping_never_passes() {
        assert_eq!(Verdict::all([Pass, Pass]), Pass);
        assert_eq!(Verdict::all([Pass, NotRun]), Partial);
        assert_eq!(Verdict::all([NotRun]), NotRun);
        assert_eq!(Verdict::all([]), NotRun);
        assert_eq!(Verdict::all([Partial]), Partial);
        assert_eq!(Verdict::all([Pass, NotRun, Fail]), Fail);
    }
}
