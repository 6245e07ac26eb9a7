//! Sharding strategies: how parameters, gradients and optimizer state are spread over ranks.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// torch's `ShardingStrategy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ShardingStrategy {
    /// Parameters are gathered before a unit's forward, freed after it, gathered again for its
    /// backward, and freed; gradients and optimizer state are sharded. torch's `FULL_SHARD`.
    #[default]
    FullShard,
    /// Like `FullShard`, but parameters stay gathered from forward to backward: torch's
    /// `SHARD_GRAD_OP`.
    ShardGradOp,
    /// Every rank holds everything, and gradients are all-reduced: torch's `NO_SHARD`. A single
    /// rank always has this strategy.
    NoShard,
    /// Like `FullShard` along the last dimension of a 2-D mesh, and replicated along the first:
    /// gradients are reduce-scattered among the ranks that share shards, then all-reduced across
    /// replicas. torch's `HYBRID_SHARD`.
    HybridShard,
}

impl ShardingStrategy {
    /// Every strategy.
    pub const ALL: [ShardingStrategy; 4] = [
        ShardingStrategy::FullShard,
        ShardingStrategy::ShardGradOp,
        ShardingStrategy::NoShard,
        ShardingStrategy::HybridShard,
    ];

    /// Returns the name that the command line and the logs use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            ShardingStrategy::FullShard => "full-shard",
            ShardingStrategy::ShardGradOp => "shard-grad-op",
            ShardingStrategy::NoShard => "no-shard",
            ShardingStrategy::HybridShard => "hybrid-shard",
        }
    }
}

impl fmt::Display for ShardingStrategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for ShardingStrategy {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::ALL
            .into_iter()
            .find(|strategy| strategy.name() == name);
        found.ok_or_else(|| {
            format!(
                "unknown strategy `{name}`: use {}",
                Self::ALL.map(Self::name).join(", ")
            )
        })
    }
}
