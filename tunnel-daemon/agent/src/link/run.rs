//! The task of a link: runs its driver and its connection, and ends both.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use adit_core::wire::encode::MessageBuf;
use h2::client::SendRequest;
use tokio::time::timeout;

use super::{Hooks, Running};
use adit_net::poll_set::together;
use adit_net::tasks::Tasks;
use adit_tunnel::{LinkDriver, LinkExit};

/// Time for the server to answer each of the two steps of an orderly end.
const GOODBYE_MAX: Duration = Duration::from_millis(250);

/// Runs a link and its connection in one task, until the link is over.
pub(super) async fn run(
    mut driver: LinkDriver<Hooks>,
    mut connection: Option<Running>,
    requests: SendRequest<MessageBuf>,
    tasks: Tasks,
) -> LinkExit {
    let over = together(|cx| {
        if let Poll::Ready(over) = Pin::new(&mut driver).poll(cx) {
            return Poll::Ready(over);
        }
        if let Some(open) = &mut connection
            && open.as_mut().poll(cx).is_ready()
        {
            connection = None;
            // The link learns the error from its stream.
            cx.waker().wake_by_ref();
        }
        Poll::Pending
    })
    .await;
    if matches!(over, LinkExit::Stopped) {
        driver.finish();
        let ended = together(|cx| {
            let is_closed = match &mut connection {
                Some(open) => open.as_mut().poll(cx).is_ready(),
                None => return Poll::Ready(()),
            };
            if is_closed {
                connection = None;
                return Poll::Ready(());
            }
            driver.poll_finished(cx)
        });
        let _late = timeout(GOODBYE_MAX, ended).await;
    }
    drop((driver, requests));
    if let LinkExit::Failed(_) = over {
        // The server does not read: what waits for the socket would stay in memory. The reset leaves if there is room.
        if let Some(open) = &mut connection {
            poll_fn(|cx| {
                let _ended = open.as_mut().poll(cx);
                Poll::Ready(())
            })
            .await;
        }
        return over;
    }
    // The connection still sends GOAWAY and close_notify, and ends by itself.
    match connection {
        None => (),
        // Too late for a task of its own.
        Some(rest) if tasks.is_stopping() => {
            let _late = timeout(GOODBYE_MAX, rest).await;
        }
        Some(rest) => {
            // At the limit of tasks the server sees the connection cut off.
            let _full = tasks.spawn("agent-connection", async move {
                let _ended = rest.await;
            });
        }
    }
    over
}
