//! Groups of some ranks of a group.

use fsdp_layout::DeviceMesh;
use sha2::{Digest as _, Sha256};

use crate::backend::Members;
use crate::collectives::check;
use crate::environment::MAX_WORLD_SIZE;
use crate::error::CommError;
use crate::group::{ProcessGroup, Turn};
use crate::record::{Call, Operation};

impl ProcessGroup {
    /// Creates a group of some of this group's ranks: torch's `new_group`. Every rank of this group
    /// must call it with the same ranks, in any order. Ranks outside the new group get `None`. In
    /// the new group, ranks are numbered in ascending order.
    ///
    /// # Errors
    /// An empty list, ranks that are repeated or outside this group, and lists that differ between
    /// callers.
    pub fn subgroup(&self, ranks: &[usize]) -> Result<Option<ProcessGroup>, CommError> {
        let mut ranks = ranks.to_vec();
        ranks.sort_unstable();
        let call = Call {
            sizes: ranks.clone(),
            ..Call::new(Operation::Subgroup)
        };
        let arguments = check(&call, || {
            if ranks.is_empty() {
                return Err("a group needs at least one rank".to_owned());
            }
            if let Some(repeated) = ranks.windows(2).find(|pair| pair[0] == pair[1]) {
                return Err(format!("rank {} is given twice", repeated[0]));
            }
            match ranks.iter().find(|&&rank| rank >= self.world_size()) {
                Some(rank) => Err(format!(
                    "there is no rank {rank} in a group of {}",
                    self.world_size()
                )),
                None => Ok(()),
            }
        });
        let mut turn = self.begin(call, arguments)?;
        turn.create_group(&ranks)
    }

    /// Creates the group of the ranks that differ from this one only along dimension `dim` of a
    /// mesh over this group: torch's `DeviceMesh.get_group(dim)`. All groups of that dimension are
    /// made at once, so every rank of this group must call it.
    ///
    /// # Errors
    /// A mesh of another size or without that dimension; meshes or dimensions that differ between
    /// callers.
    pub fn mesh_group(&self, mesh: &DeviceMesh, dim: usize) -> Result<ProcessGroup, CommError> {
        let call = Call {
            sizes: mesh.shape().iter().copied().chain([dim]).collect(),
            ..Call::new(Operation::MeshGroup)
        };
        let ranks = mesh
            .ranks_along(dim, self.rank())
            .filter(|_| mesh.size() == self.world_size());
        let arguments = check(&call, || match ranks {
            Some(_) => Ok(()),
            None => Err(format!(
                "dimension {dim} of a mesh of shape {:?} does not exist over {} ranks",
                mesh.shape(),
                self.world_size()
            )),
        });
        let mut turn = self.begin(call, arguments)?;
        let mesh_ranks = ranks.expect("a mesh without these ranks is a wrong argument");
        let group = turn.create_group(&mesh_ranks)?;
        Ok(group.expect("the ranks along a dimension include the rank itself"))
    }
}

impl ProcessGroup {
    /// Creates the group of the ranks that remain without the `excluded` ones, which may be lost:
    /// torch's `shrink_group`. The ranks that remain call it with the same `excluded` ranks, and
    /// keep their order; the excluded ones do not call it. It may be called after this group has
    /// failed: the error of a lost rank names it, by its number in the group of all ranks.
    ///
    /// ```
    /// use fsdp_comm::{CommError, run_local};
    /// let outcomes = run_local(3, |group| {
    ///     if group.rank() == 1 {
    ///         return Ok(()); // It leaves.
    ///     }
    ///     match group.barrier() {
    ///         Err(CommError::RankLeft { rank, .. }) => group.shrink(&[rank])?.barrier(),
    ///         other => other,
    ///     }
    /// })?;
    /// assert_eq!(outcomes, [Ok(()), Ok(()), Ok(())]);
    /// # Ok::<(), CommError>(())
    /// ```
    ///
    /// # Errors
    /// No excluded ranks, or such that are outside this group, or this rank itself. A rank that
    /// remains is lost too: call it again and leave out both. Ranks that remain and exclude others,
    /// or do not come within the deadline. The backend `mpi` has no such groups.
    pub fn shrink(&self, excluded: &[usize]) -> Result<ProcessGroup, CommError> {
        let rank_count = self.world_size();
        let mistake = if excluded.is_empty() {
            Some("it must leave out a rank".to_owned())
        } else if excluded.contains(&self.rank()) {
            Some(format!(
                "rank {} is to be left out, and must not call it",
                self.rank()
            ))
        } else {
            let unknown = excluded.iter().find(|&&rank| rank >= rank_count);
            unknown.map(|rank| format!("there is no rank {rank} in a group of {rank_count}"))
        };
        if let Some(message) = mistake {
            return Err(CommError::invalid_argument("shrink", message));
        }
        let remaining: Vec<usize> = (0..rank_count)
            .filter(|rank| !excluded.contains(rank))
            .collect();
        let rank = remaining.iter().position(|&rank| rank == self.rank());
        let global_ranks: Vec<usize> = remaining
            .iter()
            .map(|&rank| self.global_ranks()[rank])
            .collect();
        self.create_shrunk(Members {
            id: shrunk_group_number(self.number(), &global_ranks),
            global_ranks,
            rank: rank.expect("this rank is not excluded"),
        })
    }
}

/// Returns the number of the group of those `ranks` that remain of a group. No messages are needed
/// to agree on it, and ranks that think that others remain come to another number. The highest bit
/// tells it from the numbers that ranks choose.
fn shrunk_group_number(group: u64, ranks: &[usize]) -> u64 {
    let mut hash = Sha256::new_with_prefix(group.to_le_bytes());
    for &rank in ranks {
        hash.update((rank as u64).to_le_bytes());
    }
    let digest: [u8; 32] = hash.finalize().into();
    let first = digest
        .first_chunk()
        .expect("a digest has more than 8 bytes");
    u64::from_le_bytes(*first) | 1 << 63
}

impl Turn<'_> {
    /// Creates the group of `ranks` of the present group, in which this rank need not be. All
    /// ranks of the present group call this, with the same ranks or with ranks of groups that have
    /// no rank in common. Takes one round. Returns `None` on a rank that is not in `ranks`.
    fn create_group(&mut self, ranks: &[usize]) -> Result<Option<ProcessGroup>, CommError> {
        // No two groups of a job may have the same number. So the first rank of a group chooses it:
        // a number that it has not chosen before, followed by the 16 bits of its own rank.
        let first_rank = ranks[0];
        let global_rank = self.group.global_ranks()[first_rank];
        let name = self.call.name().to_owned();
        let proposed_number = self.next_group_number();
        let mut chosen_number = 0;
        self.round(None, vec![proposed_number], &[], |attachments| {
            chosen_number = *attachments[first_rank].numbers.first().ok_or_else(|| {
                let message = format!("rank {global_rank} has chosen no number for a group");
                CommError::object(&name, "decode", message)
            })?;
            Ok(None)
        })?;
        let Some(rank) = ranks.iter().position(|&rank| rank == self.group.rank()) else {
            self.stay_outside()?;
            return Ok(None);
        };
        let members = Members {
            id: chosen_number << MAX_WORLD_SIZE.ilog2() | global_rank as u64,
            global_ranks: ranks
                .iter()
                .map(|&rank| self.group.global_ranks()[rank])
                .collect(),
            rank,
        };
        self.create_subgroup(members).map(Some)
    }
}
