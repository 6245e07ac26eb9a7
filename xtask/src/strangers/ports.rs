//! The ports at which the ranks of a job listen, as the system tells them.

use std::fs;

use anyhow::{Context, Result};
use rustix::process::Pid;

/// The two kinds of ports of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PortKind {
    /// The port of the store, which rank 0 keeps open for as long as the job runs.
    Store,
    /// A rank's own port, which is open until all ranks have met.
    Rank,
}

/// An open port of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) port: u16,
    pub(super) kind: PortKind,
}

/// The state of a socket that listens, in the table of the system.
const LISTENS: &str = "0A";

/// Returns the ports at which these processes listen. One that has ended meanwhile has none.
pub(super) fn targets(ranks: &[Pid]) -> Vec<Target> {
    // The tables have the ports of all processes; the files of a process tell which are its own.
    let mut open = Vec::new();
    // A host without IPv6 has no second table.
    for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
        if let Ok(text) = fs::read_to_string(table) {
            open.extend(listeners(&text));
        }
    }
    let mut targets = Vec::new();
    for rank in ranks {
        let Ok(files) = fs::read_dir(format!("/proc/{}/fd", rank.as_raw_nonzero())) else {
            continue;
        };
        let sockets: Vec<u64> = files
            .filter_map(|file| fs::read_link(file.ok()?.path()).ok())
            .filter_map(|link| socket(link.to_str()?))
            .collect();
        let store = store_of(*rank).ok();
        for (port, socket) in &open {
            if !sockets.contains(socket) {
                continue;
            }
            let kind = if store == Some(*port) {
                PortKind::Store
            } else {
                PortKind::Rank
            };
            targets.push(Target { port: *port, kind });
        }
    }
    targets
}

/// Returns the port of the store of a job, as the launcher has told its ranks.
pub(super) fn store_of(rank: Pid) -> Result<u16> {
    let variables = fs::read(format!("/proc/{}/environ", rank.as_raw_nonzero()))?;
    store_port(&variables).context("a rank has no MASTER_PORT")
}

/// Returns the number of a socket from the link of an open file; `None` if that is no socket.
fn socket(link: &str) -> Option<u64> {
    link.strip_prefix("socket:[")?
        .strip_suffix(']')?
        .parse()
        .ok()
}

/// Returns the value of `MASTER_PORT` among the variables of a process, each of which ends with a
/// zero byte.
fn store_port(variables: &[u8]) -> Option<u16> {
    variables
        .split(|byte| *byte == 0)
        .filter_map(|variable| std::str::from_utf8(variable).ok())
        .find_map(|variable| variable.strip_prefix("MASTER_PORT=")?.parse().ok())
}

/// Returns the port and the number of each socket that listens, from `/proc/net/tcp` or `tcp6`.
fn listeners(table: &str) -> Vec<(u16, u64)> {
    // The heading is no address.
    table.lines().skip(1).filter_map(listener).collect()
}

/// Returns the port and the number of the socket of a line, if it listens.
fn listener(line: &str) -> Option<(u16, u64)> {
    let words: Vec<&str> = line.split_whitespace().collect();
    if *words.get(3)? != LISTENS {
        return None;
    }
    let (_, port) = words.get(1)?.rsplit_once(':')?;
    let socket = words.get(9)?.parse().ok()?;
    Some((u16::from_str_radix(port, 16).ok()?, socket))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    const TABLE: &str = "\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:733C 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 4711 1 0 100 0 0 10 0
   1: 0100007F:8AE0 0100007F:733C 01 00000000:00000000 00:00000000 00000000  1000        0 4712 1 0 20 4 30 10 -1
   2: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 17 1 0 100 0 0 10 0
   3: broken
";

    #[test]
    fn only_sockets_that_listen_are_listed_with_their_ports() {
        assert_eq!(listeners(TABLE), [(29500, 4711), (22, 17)]);
        assert_eq!(listeners(""), []);
        let six =
            "heading\n   0: 00000000000000000000000001000000:733D 0:0 0A 0:0 00:0 0 0 0 99 1 0 100";
        assert_eq!(listeners(six), [(29501, 99)]);
    }

    #[test]
    fn links_of_other_files_are_no_sockets() {
        assert_eq!(socket("socket:[4711]"), Some(4711));
        for other in [
            "pipe:[4711]",
            "/dev/null",
            "socket:[]",
            "anon_inode:[eventpoll]",
        ] {
            assert_eq!(socket(other), None, "{other}");
        }
    }

    #[test]
    fn the_port_of_the_store_is_that_of_the_variable() {
        assert_eq!(
            store_port(b"RANK=0\0MASTER_PORT=29500\0OLD_MASTER_PORT=1\0"),
            Some(29500)
        );
        assert_eq!(store_port(b"OLD_MASTER_PORT=1\0MASTER_PORT=no\0"), None);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_listeners_of_a_process_are_found() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let own = Target {
            port: listener.local_addr().unwrap().port(),
            kind: PortKind::Rank,
        };
        let this = rustix::process::getpid();
        assert!(targets(&[this]).contains(&own));
        drop(listener);
        assert!(!targets(&[this]).contains(&own));
    }
}
