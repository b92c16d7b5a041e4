//! Why windows end, as timelines, graphs and explanations tell it.

use crate::site::Site;
use oxitorch_capture::Reason;

/// Why a window is to end.
#[derive(Clone, Copy)]
pub(crate) struct Ending<'a> {
    pub(crate) reason: Reason,
    /// Says which collective is the reason, if one is: for who is told, which is seldom.
    pub(crate) which: Option<&'a dyn Fn() -> String>,
}

impl From<Reason> for Ending<'_> {
    fn from(reason: Reason) -> Self {
        Ending { reason, which: None }
    }
}

impl<'a> Ending<'a> {
    /// A collective is the reason; `which` says it.
    pub(crate) fn collective(which: &'a dyn Fn() -> String) -> Ending<'a> {
        Ending { reason: Reason::Collective, which: Some(which) }
    }

    /// It has ended, by a call of this line.
    pub(crate) fn at(self, site: Site) -> Ended {
        Ended { reason: self.reason, site, collective: self.which.map(|which| which()) }
    }
}

/// Why and where a window ended.
#[derive(Clone, Debug)]
pub(crate) struct Ended {
    pub(crate) reason: Reason,
    pub(crate) site: Site,
    /// Which collective is the reason, in words.
    pub(crate) collective: Option<String>,
}
