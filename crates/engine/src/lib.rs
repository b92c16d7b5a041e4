//! The engine: storages and views, the op stream, programs, the launch queue, memory and metrics.
//!
//! * [`Slot`] stands for one PyTorch storage and points at an immutable value; a write rebinds it.
//! * [`Engine::dispatch`] takes one ATen call ([`Op`], [`Call`]), records the instances that it needs on the [`Stream`] of
//!   its device, and gives back what PyTorch has to build ([`Output`]).
//! * A flush turns what was recorded into a program (compiled in the background) and queues its launch.
//!
//! It knows no Python and no torch library; call sites are numbers that the front end can turn into text.
#![forbid(unsafe_code)]

mod absent;
mod agree;
mod apart;
mod arguments;
mod bodies;
mod body;
mod bounded;
mod buffers;
mod bulk;
mod cached;
mod call;
mod carry;
mod collective;
mod config;
mod decomposed;
mod dispatch;
mod effort;
mod ending;
mod engine;
mod error;
mod events;
mod executor;
mod explain;
mod express;
mod family;
mod fence;
mod flight;
mod flush;
mod graph;
mod graphs;
mod groups;
mod images;
mod inst;
mod isolate;
mod known;
mod lanes;
mod launch;
mod mark;
mod masks;
mod memory;
mod mesh;
mod metrics;
mod missed;
mod numbered;
mod ops;
mod pad;
mod part;
mod picked;
mod processes;
mod profile;
mod program;
mod recipe;
mod replay;
mod report;
mod roles;
mod shared;
mod site;
mod split;
mod spread;
mod steps;
mod stream;
mod strided;
mod tape;
mod taping;
mod target;
mod tensor;
mod threads;
mod timing;
mod trace;
mod turns;
mod underway;
mod undonated;
mod value;
mod view;
mod window;
mod work;

pub use absent::Absent;
pub use body::Asked;
pub use cached::{CacheOptions, MAX_LOADED, MAX_LOADED_BYTES};
pub use call::{ArgRef, Call, Meta, Op, Output, Outputs};
pub use config::{Limits, Lowering, Mode, Remembered, Switches, target_options};
pub use decomposed::Decomposed;
pub use engine::{Engine, Numbered, Options};
pub use error::{Error, ErrorKind, Refusal, Result};
pub use events::{Heard, Listener};
pub use express::{Express, Plain};
pub use graphs::Shown;
pub use mark::Mark;
pub use memory::{Memory, Reading};
pub use metrics::{COMPILE_BUCKETS_MS, Collectives, DeviceReport, Metrics};
pub use numbered::Stands;
pub use oxitorch_cache::Shared as SharedCache;
pub use oxitorch_capture::{Collective, Reason, Reduction};
pub use oxitorch_hlo::{Mesh, Sharding};
pub use processes::Target as TaskTarget;
pub use profile::{Seen, SeenKind, set_running};
pub use program::UserOptions;
pub use recipe::{GraphOutput, Home, Prepared, Recipe, Rng};
pub use site::{Site, set_resolver};
pub use stream::Stream;
pub use tape::{Ends, Traced};
pub use target::{AbsentDevice, Target};
pub use tensor::{Place, TensorRef};
pub use threads::{Caller, set_caller};
pub use timing::{Parts, Split};
pub use value::{Slot, Value};
pub use view::View;
pub use work::{About, Group, Interrupt, Lane, Task, Work};
