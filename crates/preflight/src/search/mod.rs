//! The script in variants: until the largest batch is found, the cheapest checkpoints, or what advice is worth.

pub(crate) mod checks;
pub(crate) mod fit;
pub(crate) mod remat;
