//! An open port, with a thread that lets in those who have the job's key.

use std::io;
use std::net::SocketAddr;
use std::thread::{self, JoinHandle};

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;

use super::acceptor::accept_authenticated;
use super::handshake::Hello;
use super::key::Key;

/// An open port. It is closed when this is dropped.
#[derive(Debug)]
pub(crate) struct Port {
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Port {
    /// Listens at the first of `addresses` that is one of this host. A thread of this `name`
    /// calls `on_authenticated` with each connection that has completed the handshake, inside of a
    /// tokio runtime.
    ///
    /// # Errors
    /// The port is taken, or no address is one of this host; the system refuses a thread, or what
    /// the runtime needs.
    pub(crate) fn open(
        addresses: &[SocketAddr],
        key: Key,
        name: &str,
        on_authenticated: impl FnMut(TcpStream, Hello) + Send + 'static,
    ) -> io::Result<Port> {
        // Listen before the thread starts, so that the caller learns why that is not possible.
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let listener = runtime.block_on(bind(addresses))?;
        let address = listener.local_addr()?;
        let (stop, stopped) = oneshot::channel();
        let thread = thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                runtime.block_on(async {
                    tokio::select! {
                        () = accept_authenticated(&listener, &key, on_authenticated) => {}
                        _ = stopped => {}
                    }
                });
            })?;
        Ok(Port {
            address,
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    /// Returns the address at which it listens.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        // The listener is closed when the thread has ended, so wait for that.
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
    }
}

/// Listens at the first of `addresses` that is one of this host. If somebody else has the port
/// there, the next address is of no use: those who look for this port would try the taken one
/// first.
async fn bind(addresses: &[SocketAddr]) -> io::Result<TcpListener> {
    let mut last_error = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for &address in addresses {
        match TcpListener::bind(address).await {
            Err(error) if error.kind() != io::ErrorKind::AddrInUse => last_error = error,
            bound => return bound,
        }
    }
    Err(last_error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_os = "linux")]
    fn a_port_is_opened_at_the_first_address_of_this_host_and_nowhere_if_it_is_taken_there() {
        let open = |addresses: &[&str]| {
            let addresses: Vec<SocketAddr> = addresses
                .iter()
                .map(|address| address.parse().unwrap())
                .collect();
            Port::open(&addresses, Key::for_job(None, "job"), "test", |_, _| ())
                .map(|port| port.address())
        };
        // An address for documentation, which no host has.
        let nowhere = "198.51.100.1:0";
        assert!(open(&[nowhere, "127.0.0.1:0"]).unwrap().ip().is_loopback());
        assert_eq!(
            open(&[nowhere]).unwrap_err().kind(),
            io::ErrorKind::AddrNotAvailable
        );
        assert_eq!(open(&[]).unwrap_err().kind(), io::ErrorKind::NotFound);
        let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let here = taken.local_addr().unwrap().to_string();
        let elsewhere = here.replace("127.0.0.1:", "127.0.0.2:");
        assert_eq!(
            open(&[&here, &elsewhere]).unwrap_err().kind(),
            io::ErrorKind::AddrInUse
        );
        open(&[&elsewhere, &here]).unwrap();
    }
}
