//! The machines of a job, and the times of saves and loads on them. Pure arithmetic, in seconds and
//! bytes.

use clap::Args;

use crate::parsers::parse_positive;

/// The machines that a job runs on: speeds in bytes per second, and times in seconds.
#[derive(Debug, Args)]
pub(super) struct Machines {
    /// GB/s at which one rank copies its state to its host's memory
    #[arg(long, value_name = "GB/S", default_value = "20", value_parser = units_parser(1e9))]
    staging: f64,
    /// GB/s between one host and the storage
    #[arg(long, value_name = "GB/S", default_value = "25", value_parser = units_parser(1e9))]
    host_link: f64,
    /// GB/s of the storage, for all hosts together
    #[arg(long, value_name = "GB/S", default_value = "200", value_parser = units_parser(1e9))]
    storage: f64,
    /// Mean hours between two failures of one host
    // The default is that of the hosts that trained Llama 3.
    #[arg(long, value_name = "HOURS", default_value = "5700", value_parser = units_parser(3600.0))]
    pub(super) mtbf: f64,
    /// Minutes from a failure until a new start can load
    #[arg(long, value_name = "MINUTES", default_value = "10", value_parser = units_parser(60.0))]
    pub(super) restart: f64,
}

/// Returns the parser of a number of units of this many bytes or seconds. Speeds and times are
/// divisors, so none may be 0.
fn units_parser(unit: f64) -> impl Fn(&str) -> Result<f64, String> + Clone {
    move |text| Ok(parse_positive(text)? * unit)
}

/// The bytes that a save or a load moves.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Traffic {
    /// The bytes that the busiest rank moves.
    pub(super) rank_bytes: u64,
    /// The bytes that the busiest host moves.
    pub(super) host_bytes: u64,
    /// The bytes that all ranks move.
    pub(super) total_bytes: u64,
}

impl Machines {
    /// Returns how long ranks take to copy what they save to their hosts' memory. Training stands
    /// still meanwhile.
    pub(super) fn stall_seconds(&self, held: &Traffic) -> f64 {
        held.rank_bytes as f64 / self.staging
    }

    /// Returns how long it takes to move bytes between hosts and storage: as long as the busiest
    /// host, or the storage, whichever is slower.
    pub(super) fn transfer_seconds(&self, traffic: &Traffic) -> f64 {
        (traffic.host_bytes as f64 / self.host_link).max(traffic.total_bytes as f64 / self.storage)
    }
}

impl Traffic {
    /// Adds up what each rank moves, on hosts of `per_host` ranks that follow each other.
    pub(super) fn of_ranks(bytes_by_rank: &[u64], ranks_per_host: usize) -> Self {
        // Ranks of one host share its link to the storage.
        let hosts = bytes_by_rank
            .chunks(ranks_per_host.max(1))
            .map(|host| host.iter().sum::<u64>());
        Traffic {
            rank_bytes: bytes_by_rank.iter().copied().fold(0, u64::max),
            host_bytes: hosts.fold(0, u64::max),
            total_bytes: bytes_by_rank.iter().sum(),
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
                rank_bytes: 6,
                host_bytes: 10,
                total_bytes: 15
            }
        );
        let mut machines = Machines {
            staging: 3.0,
            host_link: 2.0,
            storage: 100.0,
            mtbf: 1.0,
            restart: 1.0,
        };
        assert_eq!(machines.stall_seconds(&traffic), 2.0);
        assert_eq!(machines.transfer_seconds(&traffic), 5.0);
        machines.storage = 1.0;
        assert_eq!(machines.transfer_seconds(&traffic), 15.0);
        assert_eq!(
            Traffic::of_ranks(&[], 8),
            Traffic {
                rank_bytes: 0,
                host_bytes: 0,
                total_bytes: 0
            }
        );
    }
}
