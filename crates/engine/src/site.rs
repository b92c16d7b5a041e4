//! Call sites: which Python line asked for an op.
//!
//! The front end interns the Python stack of an op to a small number, cheap enough to do always, and resolves it to text
//! only when a message needs it. This crate knows no Python: it carries the number and asks for the words.

use std::sync::OnceLock;

/// An interned Python stack; 0 is "unknown".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Site(pub u32);

impl Site {
    /// In the number of a site: the op belongs to the backward of that line.
    pub const OF_BACKWARD: u32 = 1 << 31;

    /// Its words: `file.py:12 in function`; none if it is unknown.
    pub fn describe(self) -> Option<String> {
        describe(self)
    }

    pub(crate) fn is_of_backward(self) -> bool {
        self.0 & Site::OF_BACKWARD != 0
    }
}

type Resolver = fn(Site) -> Option<String>;
static RESOLVER: OnceLock<Resolver> = OnceLock::new();

/// Installs the function that turns a site into `file.py:12`. The first call wins.
pub fn set_resolver(f: fn(Site) -> Option<String>) {
    RESOLVER.get_or_init(|| f);
}

/// The Python line of a site, innermost frame outside libraries; `None` if it is unknown.
pub(crate) fn describe(site: Site) -> Option<String> {
    if site == Site::default() { None } else { RESOLVER.get().and_then(|f| f(site)) }
}
