//! Groups of some ranks of a group.

use fsdp_layout::DeviceMesh;

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
        self.round(None, vec![proposed_number], &[], |records| {
            chosen_number = *records[first_rank]
                .header
                .own_numbers
                .first()
                .ok_or_else(|| {
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
