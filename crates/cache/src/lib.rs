//! Cache of what is slow to make, by everything that it depends on: in the process, on the disk, in a folder or an
//! object store that machines share.
//!
//! * [`Key`] names everything that a value depends on, so that a miss can be explained by the components that differ.
//! * [`Cache`] looks into the tiers one after another; of all that want the same key at once, one makes it; a [`Maker`] says how.
//! * [`Store`] is where entries are kept: a [`Folder`], an object store (feature `object-store`), or anything that can do as
//!   much.
//!
//! It does not know what the values are, and reads no environment.
#![forbid(unsafe_code)]

mod cache;
mod entry;
mod identity;
mod key;
mod lease;
pub mod listing;
mod memory;
mod owner;
#[cfg(feature = "object-store")]
mod remote;
mod stats;
mod store;
mod trust;
mod uploads;

pub use cache::{Cache, Config, DISK_BYTES, Maker, Shared, WAIT, Warn};
pub use entry::{FORMAT, Meta};
pub use identity::file_digest;
pub use key::{Component, Difference, Digest, Key};
pub use listing::Listed;
pub use memory::{Held, Limits, Memory};
#[cfg(feature = "object-store")]
pub use remote::Remote;
pub use stats::{Source, Stats};
pub use store::{Folder, Sharing, Store, Stored, programs_folder};
