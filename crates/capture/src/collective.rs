//! What the devices of a group send each other, one operation at a time.

use crate::tensor::TensorType;
use serde::{Deserialize, Serialize};

/// How elements of the members are reduced to one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reduction {
    /// Their sum.
    Sum,
    /// Their sum by their number.
    Average,
    /// Their product.
    Product,
    /// The smallest.
    Min,
    /// The largest.
    Max,
    /// Bit by bit.
    And,
    /// Bit by bit.
    Or,
    /// Bit by bit.
    Xor,
}

/// What each member of a group does with a tensor of its own. Parts are along dimension 0.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Collective {
    /// All have the reduced tensors.
    AllReduce(Reduction),
    /// All have all tensors, one behind the other.
    AllGather,
    /// Each has its part of the reduced tensors.
    ReduceScatter(Reduction),
    /// Each has one part of each tensor, one behind the other.
    AllToAll,
    /// Of each pair of members the second has the tensor of the first; who is sent nothing has zeros.
    Permute(Vec<(u32, u32)>),
    /// All have the tensor of this member.
    Broadcast(u32),
}

impl Collective {
    /// In a word, as StableHLO names it where it does.
    pub fn name(&self) -> &'static str {
        match self {
            Collective::AllReduce(_) => "all_reduce",
            Collective::AllGather => "all_gather",
            Collective::ReduceScatter(_) => "reduce_scatter",
            Collective::AllToAll => "all_to_all",
            Collective::Permute(_) => "collective_permute",
            Collective::Broadcast(_) => "collective_broadcast",
        }
    }
}

/// A collective that was asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exchanged {
    /// The training step.
    pub step: u64,
    /// The Python line.
    pub line: Option<String>,
    /// What it is.
    pub collective: Collective,
    /// The members of each group that does it, by the ids of their devices.
    pub groups: Vec<Vec<i32>>,
    /// How many collectives these groups have done before.
    pub number: u64,
    /// The tensor of each member.
    pub r#type: TensorType,
    /// What that takes on the device.
    pub bytes: u64,
}

/// A collective of several processes that was asked for, of which this process does its part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupCall {
    /// The training step.
    pub step: u64,
    /// The Python line; of what a backward pass asks for, that of the forward.
    pub line: Option<String>,
    /// Whether a backward pass asks for it.
    #[serde(default)]
    pub backward: bool,
    /// As `torch.distributed` calls it: `all_reduce`, `all_gather_into_tensor`.
    pub name: String,
    /// The ranks of its group.
    pub ranks: Vec<u64>,
    /// Its first tensor; none if it has none, as a barrier.
    pub r#type: Option<TensorType>,
    /// What this process has before or after it, whichever is more.
    pub bytes: u64,
}
