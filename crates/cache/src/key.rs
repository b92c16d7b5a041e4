//! Keys: everything that a cached value depends on, component by component.

use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::fmt::Write;

/// A blake3 digest.
pub type Digest = [u8; 32];

/// Contents up to this many bytes are kept as text beside their digest, so that people can see what differs.
const SHOWN: usize = 1024;

/// One thing that a value depends on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Component {
    /// For instance `module` or `options`.
    pub name: Cow<'static, str>,
    /// Of the content, in hexadecimal digits.
    pub digest: String,
    /// The content, if it is short and text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
}

/// Everything that a cached value depends on, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Key {
    components: Vec<Component>,
}

/// A component that two keys do not share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Difference<'a> {
    /// Its name.
    pub name: &'a str,
    /// What the first key has, if anything.
    pub ours: Option<&'a Component>,
    /// What the second key has, if anything.
    pub theirs: Option<&'a Component>,
}

impl Key {
    /// A key without components.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a component by its content.
    pub fn with(mut self, name: &'static str, content: &[u8]) -> Self {
        let text = (content.len() <= SHOWN).then(|| std::str::from_utf8(content).ok().map(str::to_owned));
        let digest = hex(blake3::hash(content).as_bytes());
        self.components.push(Component { name: Cow::Borrowed(name), digest, text: text.flatten() });
        self
    }

    /// The components, in the order they were added.
    pub fn components(&self) -> &[Component] {
        &self.components
    }

    /// A component by its name.
    pub fn get(&self, name: &str) -> Option<&Component> {
        self.components.iter().find(|c| c.name == name)
    }

    /// One digest of all components, in the order they were added.
    pub fn digest(&self) -> Digest {
        let mut h = blake3::Hasher::new();
        for c in &self.components {
            h.update(&(c.name.len() as u64).to_le_bytes()).update(c.name.as_bytes());
            h.update(&(c.digest.len() as u64).to_le_bytes()).update(c.digest.as_bytes());
        }
        *h.finalize().as_bytes()
    }

    /// The components in which two keys differ.
    pub fn differences<'a>(&'a self, other: &'a Key) -> Vec<Difference<'a>> {
        let ours = self.components.iter().map(|c| (&*c.name, Some(c), other.get(&c.name)));
        let missing = other.components.iter().filter(|c| self.get(&c.name).is_none());
        let theirs = missing.map(|c| (&*c.name, None, Some(c)));
        let differs = |(_, a, b): &(_, Option<&Component>, Option<&Component>)| {
            a.map(|c| &c.digest) != b.map(|c| &c.digest)
        };
        let all = ours.chain(theirs).filter(differs);
        all.map(|(name, ours, theirs)| Difference { name, ours, theirs }).collect()
    }
}

/// Lower-case hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    let mut out = String::with_capacity(bytes.len() * 2);
    for b in bytes {
        // Writing to a string cannot fail.
        let _ = write!(out, "{b:02x}");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_names_what_differs() {
        let a = Key::new().with("module", b"x").with("options", b"fast");
        let b = Key::new().with("module", b"x").with("options", b"slow").with("topology", b"1");
        assert_ne!(a.digest(), b.digest());
        let found = a.differences(&b);
        let text = |c: Option<&Component>| c.and_then(|c| c.text.clone());
        let shown: Vec<_> = found.iter().map(|d| (d.name, text(d.ours), text(d.theirs))).collect();
        assert_eq!(
            shown,
            [("options", Some("fast".into()), Some("slow".into())), ("topology", None, Some("1".into()))]
        );
        assert_eq!(a.differences(&a), []);
    }

    #[test]
    fn component_names_are_part_of_the_digest() {
        assert_ne!(Key::new().with("a", b"x").digest(), Key::new().with("b", b"x").digest());
    }

    #[test]
    fn long_contents_are_known_by_their_digest_alone() {
        let long = Key::new().with("module", &[b'x'; SHOWN + 1]);
        assert_eq!(long.components()[0].text, None);
        assert_ne!(long.digest(), Key::new().with("module", &[b'y'; SHOWN + 1]).digest());
    }
}
