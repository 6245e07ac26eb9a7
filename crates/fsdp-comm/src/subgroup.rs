//! Groups of some ranks of a group.

use fsdp_layout::DeviceMesh;

use crate::backend::Members;
use crate::ballot::Ballot;
use crate::collectives::check;
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
            let rank = self.rank();
            Some(format!(
                "rank {rank} is to be left out, and must not call it"
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
        let members = self.members_of(&remaining, None);
        self.create_shrunk(members.expect("this rank is not excluded"))
    }

    /// Returns the members of the group of `ranks` of this one; `None` if this rank is not in it.
    /// `operation` is the number of the operation that creates it, unless that is a shrink, which
    /// is no operation of this group.
    ///
    /// No two groups of a job may have the same number, and the ranks of one must agree on it
    /// without a message. So it is a hash of all that tells a group from others. The highest bit
    /// tells it from the group of all ranks, whose number is 0.
    fn members_of(&self, ranks: &[usize], operation: Option<u64>) -> Option<Members> {
        let global_ranks = ranks.iter().map(|&rank| self.global_ranks()[rank]);
        let global_ranks: Vec<usize> = global_ranks.collect();
        let identity = (self.members().id, operation, &global_ranks);
        Some(Members {
            id: Ballot::new(&identity).hash as u64 | 1 << 63,
            rank: ranks.iter().position(|&rank| rank == self.rank())?,
            global_ranks,
        })
    }
}

impl Turn<'_> {
    /// Creates the group of `ranks` of the present group, in which this rank need not be. All
    /// ranks of the present group call this, with the same ranks or with ranks of groups that have
    /// no rank in common. Takes one round. Returns `None` on a rank that is not in `ranks`.
    fn create_group(&mut self, ranks: &[usize]) -> Result<Option<ProcessGroup>, CommError> {
        self.synchronize()?;
        self.create_subgroup(self.group.members_of(ranks, Some(self.call.sequence)))
    }
}
