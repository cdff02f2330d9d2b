//! A deliberate slowdown in front of a program: it copies every chunk once more and spends CPU time on it. The guard must
//! detect it, or it would not detect a real one.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinSet;

/// Bytes copied at a time.
const PIECE_BYTES: usize = 16 * 1024;
/// CPU time spent on each chunk.
const PAUSE: Duration = Duration::from_micros(30);

/// Serves until the process is killed.
///
/// # Errors
/// The socket cannot be listened on.
pub(crate) async fn serve(listen: PathBuf, to: PathBuf) -> anyhow::Result<()> {
    let listener = UnixListener::bind(&listen)
        .with_context(|| format!("listening on {}", listen.display()))?;
    let mut connections = JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        let (client, _peer) = listener.accept().await?;
        let to = to.clone();
        connections.spawn(async move {
            // The client sees how the connection ended.
            let _over = pass_on(client, to).await;
        });
    }
}

async fn pass_on(client: UnixStream, to: PathBuf) -> std::io::Result<()> {
    let server = UnixStream::connect(to).await?;
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    tokio::try_join!(
        slowly(&mut from_client, &mut to_server),
        slowly(&mut from_server, &mut to_client),
    )?;
    Ok(())
}

async fn slowly(
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
) -> std::io::Result<()> {
    let mut buffer = vec![0; PIECE_BYTES];
    loop {
        let length = from.read(&mut buffer).await?;
        if length == 0 {
            return to.shutdown().await;
        }
        let begin = Instant::now();
        while begin.elapsed() < PAUSE {
            std::hint::spin_loop();
        }
        to.write_all(buffer.get(..length).unwrap_or_default())
            .await?;
    }
}
