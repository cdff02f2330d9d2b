//! Connects as kube-apiserver would: to the unix socket, or to the TCP address with the file's certificates and CA.

use std::io;
use std::time::Duration;

use tokio::net::UnixStream;
use tokio::time::timeout;

use super::Tried;
use super::answer::{Answer, GET, HTTP2, ask, call, of_call, of_http_connect, of_no_grpc};
use super::judge::{Protocol, Route, TlsRoute};
use crate::check::line::{degraded, missing, ok};
use crate::status::model::Capability;
use adit_config::limits::TLS_HANDSHAKE_TIMEOUT;
use adit_net::direct;
use adit_net::happy_eyeballs::Race;
use adit_net::resolve::{SystemResolver, servers_of_host};
use adit_net::self_sockets::OwnSockets;
use adit_tls::cause::TlsCause;
use adit_tls::handshake::connect_tls;
use adit_tls::reload::ReloadableClientTls;
use adit_tls::stream::{ByteStream, PeerAddr, Socket};
use adit_tls::tls::server_name;

/// Time for a connection to open.
const CONNECT: Duration = Duration::from_secs(10);

/// A failure, and its remedy.
pub(in crate::check) type Failure = (String, &'static str);

/// Tries one route.
///
/// # Errors
/// The resolver could not be created.
pub(super) async fn line(tried: &Tried) -> anyhow::Result<Capability> {
    let (shown, answer) = match &tried.route {
        Route::Direct => {
            let text = format!("{}: Direct: kube-apiserver asks no server", tried.names);
            return Ok(ok(text));
        }
        Route::Unix { protocol, path } => (path.clone(), unix(*protocol, path).await),
        Route::Tls(route) => match &tried.tls {
            Some(tls) => (route.to_string(), over_tls(route, tls).await?),
            None => return Ok(tried.without_files()),
        },
    };
    let at = format!("{}: {shown}", tried.names);
    Ok(match answer {
        Ok(line) => Capability {
            text: format!("{at} {}", line.text),
            ..line
        },
        Err((text, remedy)) => missing(format!("{at}: {text}"), remedy),
    })
}

async fn unix(protocol: Protocol, path: &str) -> Result<Capability, Failure> {
    let mut stream = connect_unix(path).await?;
    match protocol {
        Protocol::HttpConnect => Ok(of_http_connect(&ask(&mut stream, GET).await)),
        Protocol::Grpc => match ask(&mut stream, HTTP2).await {
            Answer::Http2 => Ok(of_call(&call(connect_unix(path).await?).await)),
            other => Ok(of_no_grpc(&other)),
        },
    }
}

async fn connect_unix(path: &str) -> Result<UnixStream, Failure> {
    // A leading @ is the abstract namespace, for Go as for tokio's zero byte.
    let address = match path.strip_prefix('@') {
        Some(name) => format!("\0{name}"),
        None => path.to_owned(),
    };
    match timeout(CONNECT, UnixStream::connect(address)).await {
        Ok(connected) => connected.map_err(|error| of_unix_error(&error)),
        Err(_elapsed) => Err((
            "the server takes no connection".to_owned(),
            "look at the server's log and CPU",
        )),
    }
}

fn of_unix_error(error: &io::Error) -> Failure {
    match error.kind() {
        io::ErrorKind::NotFound => (
            "there is no such socket".to_owned(),
            "start the server, or correct udsName; for a container mount the folder of the socket, and run this check where \
             it has the same path",
        ),
        io::ErrorKind::ConnectionRefused => (
            "no process listens at this path".to_owned(),
            "start the server; the file is no socket, or one of a process that has ended",
        ),
        io::ErrorKind::PermissionDenied => (
            "this user may not connect to the socket".to_owned(),
            "run this check as kube-apiserver's user; the socket's mode and folder permit its user and group",
        ),
        _ => (format!("cannot connect: {error}"), "correct udsName"),
    }
}

async fn over_tls(
    route: &TlsRoute,
    tls: &ReloadableClientTls,
) -> anyhow::Result<Result<Capability, Failure>> {
    let resolver = SystemResolver::new()?;
    let connected = timeout(CONNECT, tcp(&resolver, &route.host, route.port)).await;
    let connected = connected.unwrap_or_else(|_elapsed| {
        let text = format!("no connection within {} s", CONNECT.as_secs());
        Err((text, "check the address and the network path"))
    });
    Ok(match connected {
        Ok(connected) => secured(connected, route, tls).await,
        Err(failure) => Err(failure),
    })
}

async fn secured(
    (socket, peer): (Socket, PeerAddr),
    route: &TlsRoute,
    tls: &ReloadableClientTls,
) -> Result<Capability, Failure> {
    let name = server_name(route.server_name());
    let name = name.map_err(|error| (error.to_string(), "correct url or tlsServerName"))?;
    match connect_tls(socket, peer, tls, name, None, TLS_HANDSHAKE_TIMEOUT).await {
        Ok(stream) => speak_tls(stream).await,
        Err(error) if matches!(error.cause, TlsCause::OfCa) => {
            let (text, remedy) = of_handshake(&error.cause);
            Ok(degraded(text, remedy))
        }
        Err(error) => Err(of_handshake(&error.cause)),
    }
}

/// Connects to the first address of the host that takes the connection.
pub(in crate::check) async fn tcp(
    resolver: &SystemResolver,
    host: &str,
    port: u16,
) -> Result<(Socket, PeerAddr), Failure> {
    const REMEDY: &str = "start the server, or correct the address; a firewall may be between";
    let found = servers_of_host(resolver, host, port, |below| rand::random_range(0..below)).await;
    let found =
        found.map_err(|error| (format!("lookup {host}: {error}"), "correct the host of url"))?;
    let own = OwnSockets::off();
    let mut race = Race::new(found, |server| {
        let own = &own;
        async move {
            let socket = direct::socket_for(server.addr)?;
            direct::connect(own, socket, server.addr).await
        }
    });
    let mut told = (format!("{host} has no address"), "correct the host of url");
    while let Some((server, connected)) = race.next().await {
        match connected {
            Ok(stream) => return Ok((Socket::Tcp(stream), PeerAddr::Tcp(server.addr))),
            Err(error) => told = (format!("dial {}: {error}", server.addr), REMEDY),
        }
    }
    Err(told)
}

/// A certificate that is a CA is refused here, and taken by kube-apiserver.
fn of_handshake(cause: &TlsCause) -> Failure {
    let remedy = match cause {
        TlsCause::WrongName { .. } => {
            "write a host of the certificate into url or tlsServerName, or issue the certificate for this one"
        }
        TlsCause::Stranger { .. } => {
            "look whether url leads to this server; if it does, give its CA in caBundle and its name in tlsServerName"
        }
        TlsCause::OfCa => {
            "kube-apiserver takes it all the same, but other clients do not: issue one with CA:FALSE"
        }
        TlsCause::UnknownIssuer | TlsCause::BadSignature => {
            "give in caBundle the CA that has signed the server's certificate (--server-cert)"
        }
        TlsCause::NotTls => {
            "let the server listen with --server-cert, --server-key and --server-ca-cert, or use transport.uds"
        }
        _ => {
            "correct the certificates of kube-apiserver or of the server (--server-cert, --server-ca-cert)"
        }
    };
    (format!("TLS handshake failed: {cause}"), remedy)
}

async fn speak_tls(mut stream: ByteStream) -> Result<Capability, Failure> {
    match ask(&mut stream, GET).await {
        // With TLS 1.3 a server judges the client's certificate behind the handshake.
        Answer::Closed(error) => {
            let why = error.map_or_else(String::new, |error| format!(": {error}"));
            Err((
                format!("the server closed the connection behind the handshake{why}"),
                "give a clientCert that the server's --server-ca-cert has signed; the server's log has the cause",
            ))
        }
        answer => Ok(of_http_connect(&answer)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_a_socket_have_their_remedies() {
        for (kind, part) in [
            (io::ErrorKind::NotFound, "start the server"),
            (io::ErrorKind::ConnectionRefused, "start the server"),
            (io::ErrorKind::PermissionDenied, "as kube-apiserver's user"),
            (io::ErrorKind::InvalidInput, "correct udsName"),
        ] {
            let (_, remedy) = of_unix_error(&kind.into());
            assert!(remedy.contains(part), "{kind}: {remedy}");
        }
    }
}
