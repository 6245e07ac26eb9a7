//! The times of saves and loads over links of given speeds. Pure arithmetic, in seconds and bytes.

/// The speeds of the machines, in bytes per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Links {
    /// Between the memory that one rank computes in and its host's memory.
    pub(super) staging: f64,
    /// Between one host and the storage.
    pub(super) host_link: f64,
    /// At the storage, by all hosts together.
    pub(super) storage: f64,
}

/// The bytes that a save or a load moves.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Traffic {
    /// The bytes that the busiest rank moves.
    pub(super) rank: u64,
    /// The bytes that the busiest host moves.
    pub(super) host: u64,
    /// The bytes that all ranks move.
    pub(super) total: u64,
}

impl Links {
    /// Returns how long ranks take to copy what they save to their hosts' memory. Training stands
    /// still meanwhile.
    pub(super) fn stall(&self, held: &Traffic) -> f64 {
        held.rank as f64 / self.staging
    }

    /// Returns how long it takes to move bytes between hosts and storage: as long as the busiest
    /// host, or the storage, whichever is slower.
    pub(super) fn transfer(&self, traffic: &Traffic) -> f64 {
        (traffic.host as f64 / self.host_link).max(traffic.total as f64 / self.storage)
    }
}

impl Traffic {
    /// Adds up what each rank moves, on hosts of `per_host` ranks that follow each other.
    pub(super) fn of_ranks(by_rank: &[u64], per_host: usize) -> Self {
        // Ranks of one host share its link to the storage.
        let hosts = by_rank
            .chunks(per_host.max(1))
            .map(|host| host.iter().sum::<u64>());
        Traffic {
            rank: by_rank.iter().copied().fold(0, u64::max),
            host: hosts.fold(0, u64::max),
            total: by_rank.iter().sum(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_part_decides() {
        let traffic = Traffic::of_ranks(&[4, 6, 1, 1, 3], 2);
        assert_eq!(
            traffic,
            Traffic {
                rank: 6,
                host: 10,
                total: 15
            }
        );
        let links = Links {
            staging: 3.0,
            host_link: 2.0,
            storage: 100.0,
        };
        assert_eq!(links.stall(&traffic), 2.0);
        assert_eq!(links.transfer(&traffic), 5.0);
        assert_eq!(
            Links {
                storage: 1.0,
                ..links
            }
            .transfer(&traffic),
            15.0
        );
        assert_eq!(
            Traffic::of_ranks(&[], 8),
            Traffic {
                rank: 0,
                host: 0,
                total: 0
            }
        );
    }
}
