//! The parts of the crate, each by itself. They are here, as tests inside the crate would have all rows compiled once more.

mod case;
mod lowerings;
mod numbers;
mod promote;
mod schema;
mod sparse;
mod target;
