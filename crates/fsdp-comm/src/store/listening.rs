//! The addresses at which a store listens and is found.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, ToSocketAddrs};
use std::vec;

use super::protocol::StoreOptions;

/// Returns `true` if a store at this address (`host:port`) listens at every address of its host:
/// `host` is a name, or stands for all addresses (0.0.0.0), and there is a secret or nobody asks
/// for one.
///
/// The name of a host may lead elsewhere on that host itself: to 127.0.1.1 by `/etc/hosts` of
/// Debian, or nowhere yet in Kubernetes, where the name of a pod gets its address after the pod has
/// started.
pub(super) fn listens_everywhere(address: &str, options: &StoreOptions) -> bool {
    let host = without_brackets(host_of(address));
    // Everything that is no address is a name. `localhost` is the one name that leads to this host
    // only.
    let stands_for_all = match without_zone(host).parse::<IpAddr>() {
        Ok(ip) => ip.is_unspecified(),
        Err(_) => host != "localhost",
    };
    stands_for_all && (options.secret.is_some() || options.insecure)
}

/// Returns the host of an address (`host:port`); all of it if there is no port.
pub(super) fn host_of(address: &str) -> &str {
    address.rsplit_once(':').map_or(address, |(host, _)| host)
}

/// An address (`host:port`) to look up. The host may be an IPv6 address with the name of a zone,
/// such as `[fe80::1%eth0]`, which the standard library does not take in brackets.
#[derive(Debug, Clone, Copy)]
pub(super) struct Name<'a>(pub(super) &'a str);

impl ToSocketAddrs for Name<'_> {
    type Iter = vec::IntoIter<SocketAddr>;

    fn to_socket_addrs(&self) -> io::Result<Self::Iter> {
        match port_of(self.0) {
            Some(port) => (without_brackets(host_of(self.0)), port).to_socket_addrs(),
            None => self.0.to_socket_addrs(),
        }
    }
}

/// Returns the port of an address (`host:port`); `None` if it has none.
fn port_of(address: &str) -> Option<u16> {
    address.rsplit_once(':')?.1.parse().ok()
}

/// Returns a host without the brackets that an IPv6 address has before a port.
pub(crate) fn without_brackets(host: &str) -> &str {
    host.trim_start_matches('[').trim_end_matches(']')
}

/// Returns an address without the zone that may follow it.
pub(crate) fn without_zone(address: &str) -> &str {
    address
        .split_once('%')
        .map_or(address, |(address, _)| address)
}

/// Returns the address of a port at an IP address. If that is a link-local one, which hosts on
/// several links may have, the link is that of `local`, an address of this host.
pub(crate) fn address_in_zone(local: SocketAddr, ip: IpAddr, port: u16) -> SocketAddr {
    match (ip, local) {
        (IpAddr::V6(ip), SocketAddr::V6(local)) if ip.is_unicast_link_local() => {
            SocketAddrV6::new(ip, port, 0, local.scope_id()).into()
        }
        _ => SocketAddr::new(ip, port),
    }
}

/// Returns the addresses at which a store may listen. It listens at the first of them that this
/// host has.
pub(super) fn listening_addresses(
    address: &str,
    options: &StoreOptions,
) -> io::Result<Vec<SocketAddr>> {
    if !listens_everywhere(address, options) {
        return Name(address).to_socket_addrs().map(Iterator::collect);
    }
    let port = port_of(address)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the address has no port"))?;
    Ok(every_address(port).to_vec())
}

/// Returns the addresses that stand for all addresses of this host. Listening at the first one
/// includes those of IPv4.
pub(crate) fn every_address(port: u16) -> [SocketAddr; 2] {
    [
        (Ipv6Addr::UNSPECIFIED, port).into(),
        (Ipv4Addr::UNSPECIFIED, port).into(),
    ]
}

/// Returns the addresses at which this host reaches what listens here at this port.
pub(super) fn loopback_addresses(port: u16) -> [SocketAddr; 2] {
    [
        (Ipv4Addr::LOCALHOST, port).into(),
        (Ipv6Addr::LOCALHOST, port).into(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::Secret;

    #[test]
    fn a_store_at_a_name_listens_at_every_address_if_strangers_are_kept_out() {
        let with = |secret: Option<&str>, insecure: bool| StoreOptions {
            job: "job".to_owned(),
            secret: secret.map(|text| Secret::new(text).unwrap()),
            insecure,
            world_size: 2,
            ..StoreOptions::default()
        };
        for options in [with(Some("a secret of this test"), false), with(None, true)] {
            for name in ["node0:29500", "job-0.job.svc:0", "0.0.0.0:0", "[::]:1"] {
                assert!(listens_everywhere(name, &options), "{name}");
                assert!(
                    listening_addresses(name, &options)
                        .unwrap()
                        .iter()
                        .all(|address| address.ip().is_unspecified())
                );
            }
            for address in [
                "127.0.0.1:29500",
                "[::1]:29500",
                "10.0.0.5:1",
                "localhost:1",
                "[fe80::1%eth0]:1",
            ] {
                assert!(!listens_everywhere(address, &options), "{address}");
            }
            assert_eq!(
                listening_addresses("10.0.0.5:7", &options).unwrap(),
                ["10.0.0.5:7".parse().unwrap()]
            );
            assert!(listening_addresses("node0", &options).is_err());
        }
        assert!(!listens_everywhere("node0:29500", &with(None, false)));
    }
}
