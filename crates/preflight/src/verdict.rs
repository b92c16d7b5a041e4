//! The answer in a word.

use serde::Serialize;

/// The answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Verdict {
    /// With at least 5 % to spare.
    Fits,
    /// With less.
    FitsBarely,
    DoesNotFit,
    #[default]
    Unknown,
}

impl Verdict {
    /// Of what needs so much where there is so much.
    pub(crate) fn of(need: u64, limit: u64) -> Verdict {
        match () {
            () if need > limit => Verdict::DoesNotFit,
            () if need > Verdict::barely(limit) => Verdict::FitsBarely,
            () => Verdict::Fits,
        }
    }

    /// What leaves less than 5 % of a limit.
    pub(crate) fn barely(limit: u64) -> u64 {
        (0.95 * limit as f64) as u64
    }

    /// In words.
    pub(crate) fn words(self) -> &'static str {
        match self {
            Verdict::Fits => "fits",
            Verdict::FitsBarely => "fits with less than 5 % to spare",
            Verdict::DoesNotFit => "does not fit",
            Verdict::Unknown => "could not tell",
        }
    }

    /// The exit status of the command.
    pub(crate) fn status(self) -> i32 {
        match self {
            Verdict::Fits | Verdict::FitsBarely => 0,
            Verdict::DoesNotFit => 1,
            Verdict::Unknown => 2,
        }
    }
}
