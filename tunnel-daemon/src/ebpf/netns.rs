//! Listeners in other network namespaces, opened and closed as namespaces come and go.
//!
//! A listener keeps its namespace alive, so it closes when the namespace's file is gone. For a namespace found by the captured
//! cgroup, it closes when the namespace contains no process of that cgroup.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use tokio_util::sync::CancellationToken;

use super::capture::Mark;
use super::table::LISTENER;
use crate::listeners::Serve;
use crate::redirect_view::RedirectView;
use crate::status::model::RedirectNamespaces;
use adit_config::NetnsHelperOptions;
use adit_config::limits;
use adit_config::plan::NetnsPlan;
use adit_host::blocking::{self, BlockingError};
use adit_net::accounts::Accounts;
use adit_net::listen::Listener;
use adit_redirect::namespaces::{
    Asked, FOLDERS_MAX, Helper, HelperError, Look, Opened, PROCESSES_MAX,
};
use adit_redirect::netns;
use adit_redirect::redirect::Redirect;
use adit_telemetry::labels::NetnsHelperState;

/// Interval of scans: a new namespace may lack a listener, and a listener may keep an ended one alive, for this long.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The helper and the result of its scan.
type Looked = (Helper, Result<Look, HelperError>);

/// The captured network namespaces, and the parts that serve their listeners.
pub(crate) struct Namespaces {
    redirect: Arc<Redirect>,
    mark: Mark,
    view: Arc<RedirectView>,
    serve: Serve,
    accounts: Accounts,
    held: HashMap<u64, Held>,
    serving: FuturesUnordered<BoxFuture<'static, ()>>,
    failed: HashMap<String, String>,
    unreadable: usize,
    left_out: LeftOut,
    stop: CancellationToken,
}

struct Held {
    name: String,
    cookie: u64,
    /// Address of the IPv4 listener.
    v4: Option<SocketAddr>,
    /// The namespace also has an IPv6 listener.
    has_v6: bool,
    /// Why there is no IPv6 listener, once logged.
    v6_refused: Option<String>,
    stop: CancellationToken,
}

impl Held {
    /// Logs a new reason once. The namespace stays captured over IPv4, and each scan tries IPv6 again.
    fn log_refused(&mut self, why: String) {
        if self.v6_refused.as_ref() != Some(&why) {
            let namespace = &self.name;
            tracing::warn!(
                namespace,
                why,
                "a network namespace is captured over IPv4 only"
            );
            self.v6_refused = Some(why);
        }
    }
}

/// What scans leave out. It does not affect captured namespaces, so only its begin and end are logged.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct LeftOut {
    /// There are more namespaces than the limit.
    is_over: bool,
    /// There are more processes or cgroups than a scan examines.
    is_cut: bool,
}

/// A change of [`LeftOut`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Notice {
    Over,
    NoneOver,
    Cut,
    Whole,
}

impl LeftOut {
    /// Changes with this scan.
    fn changed_by(&mut self, look: &Look) -> Vec<Notice> {
        let now = Self {
            is_over: look.over > 0,
            is_cut: look.is_cut,
        };
        let before = std::mem::replace(self, now);
        let over = match (before.is_over, now.is_over) {
            (false, true) => Some(Notice::Over),
            (true, false) => Some(Notice::NoneOver),
            (true, true) | (false, false) => None,
        };
        let cut = match (before.is_cut, now.is_cut) {
            (false, true) => Some(Notice::Cut),
            (true, false) => Some(Notice::Whole),
            (true, true) | (false, false) => None,
        };
        over.into_iter().chain(cut).collect()
    }
}

impl Notice {
    fn log(self, over: usize) {
        match self {
            Self::Over => tracing::warn!(
                over,
                limit = limits::REDIRECT_NETNS_MAX,
                "the limit of captured network namespaces is reached: the remaining namespaces are not captured"
            ),
            Self::NoneOver => {
                tracing::info!("the limit of captured network namespaces is no longer exceeded")
            }
            Self::Cut => tracing::warn!(
                processes_max = PROCESSES_MAX,
                cgroups_max = FOLDERS_MAX,
                "the captured cgroup exceeds the limit of scanned processes or child cgroups: further network namespaces \
                 are not captured, and listeners of ended namespaces stay open"
            ),
            Self::Whole => {
                tracing::info!("all processes of the captured cgroup are scanned again")
            }
        }
    }
}

impl Namespaces {
    /// Starts the helper and opens listeners in existing namespaces. Blocks briefly. Call it before privileges are dropped.
    ///
    /// Without a helper, other namespaces are not captured: logs the reason and returns `None`.
    pub(crate) fn start(
        plan: &NetnsPlan,
        cgroup: &std::path::Path,
        parts: (Arc<Redirect>, Mark, Arc<RedirectView>, Serve),
        accounts: &Accounts,
        stop: &CancellationToken,
    ) -> Option<(Self, Helper)> {
        let (redirect, mark, view, serve) = parts;
        let options = NetnsHelperOptions {
            mark,
            cgroup: plan.auto.then(|| cgroup.to_owned()),
            paths: plan.paths.clone(),
        };
        let mut namespaces = Self {
            redirect,
            mark,
            view,
            serve,
            accounts: accounts.clone(),
            held: HashMap::new(),
            serving: FuturesUnordered::new(),
            failed: HashMap::new(),
            unreadable: 0,
            left_out: LeftOut::default(),
            stop: stop.child_token(),
        };
        let started = Helper::start(&options).and_then(|mut helper| {
            let look = helper.look(std::iter::empty())?;
            Ok((helper, look))
        });
        match started {
            Ok((helper, look)) => {
                namespaces.view.helper(NetnsHelperState::Running, None);
                namespaces.apply(look);
                let (captured, process) = (namespaces.held.len(), helper.process());
                tracing::info!(
                    captured,
                    helper = process,
                    "redirect in other network namespaces"
                );
                Some((namespaces, helper))
            }
            Err(error) => {
                namespaces.without(NetnsHelperState::Missing, &error);
                None
            }
        }
    }

    /// Opens and closes listeners until `stop`, which closes all of them.
    pub(crate) async fn keep(mut self, helper: Helper) {
        let stop = self.stop.clone();
        let mut looking = self.look(helper);
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                Some(()) = self.serving.next() => (),
                looked = &mut looking => match looked {
                    Ok((helper, Ok(look))) => {
                        self.apply(look);
                        looking = self.look(helper);
                    }
                    Ok((gone, Err(error))) => {
                        self.without(NetnsHelperState::Ended, &error);
                        // Not on a data thread: dropping the helper waits for its process to end, which may take long.
                        blocking::start(move || drop(gone));
                        looking = Box::pin(std::future::pending());
                    }
                    Err(error) => {
                        // The helper was dropped with the failed task.
                        let error = HelperError::Gone(format!("cannot be asked any more: {error}"));
                        self.without(NetnsHelperState::Ended, &error);
                        looking = Box::pin(std::future::pending());
                    }
                },
            }
        }
    }

    /// The next scan, after [`LOOK_EVERY`].
    fn look(&self, mut helper: Helper) -> BoxFuture<'static, Result<Looked, BlockingError>> {
        let held = self.held.iter().map(|(id, held)| Asked {
            id: *id,
            wants_v6: !held.has_v6,
        });
        let held: Vec<Asked> = held.collect();
        Box::pin(async move {
            tokio::time::sleep(LOOK_EVERY).await;
            blocking::run(move || {
                let look = helper.look(held.into_iter());
                (helper, look)
            })
            .await
        })
    }

    fn without(&self, state: NetnsHelperState, error: &HelperError) {
        let why = error.to_string();
        let captured = self.held.len();
        tracing::error!(
            error = why,
            captured,
            "no further network namespaces are captured until a restart"
        );
        self.view.helper(state, Some(why));
    }

    fn apply(&mut self, look: Look) {
        for notice in self.left_out.changed_by(&look) {
            notice.log(look.over);
        }
        let still = look.still;
        let gone: Vec<u64> = self
            .held
            .keys()
            .copied()
            .filter(|id| !still.contains(id))
            .collect();
        for id in gone {
            self.close(id);
        }
        let mut failed: HashMap<String, String> = look.failed.into_iter().collect();
        for opened in look.opened {
            let name = opened.name.clone();
            if let Err(error) = self.open(opened) {
                failed.insert(name, format!("{error:#}"));
            }
        }
        for (id, socket) in look.more {
            let added = self.add_v6(id, socket);
            if let (Err(error), Some(held)) = (added, self.held.get_mut(&id)) {
                held.log_refused(format!("{error:#}"));
            }
        }
        for (name, why) in &failed {
            if self.failed.get(name) != Some(why) {
                tracing::warn!(namespace = name, why, "a network namespace is not captured");
            }
        }
        self.failed = failed;
        if look.unreadable > 0 && self.unreadable == 0 {
            tracing::warn!(
                processes = look.unreadable,
                "network namespaces of captured processes cannot be read: give CAP_SYS_PTRACE at the start, and the host's process namespace (hostPID)"
            );
        }
        self.unreadable = look.unreadable;
        self.show(look.over);
    }

    fn show(&self, over: usize) {
        let mut captured: Vec<String> = self.held.values().map(|held| held.name.clone()).collect();
        captured.sort_unstable();
        let failed = self.failed.iter();
        let mut failed: Vec<String> = failed.map(|(name, why)| format!("{name}: {why}")).collect();
        failed.sort_unstable();
        self.view.namespaces(RedirectNamespaces {
            captured,
            failed,
            over_limit: over as u64,
            unreadable_processes: self.unreadable as u64,
            look_cut: self.left_out.is_cut,
            ..RedirectNamespaces::default()
        });
    }

    /// Opens the listeners first and tells the kernel afterwards: no call is sent to a port without a listener.
    fn open(&mut self, opened: Opened) -> anyhow::Result<()> {
        let mut listeners = Vec::new();
        for socket in opened.sockets {
            let accounted = |socket: BorrowedFd<'_>| self.accounts.listening(&socket);
            listeners.push(Listener::adopt(socket, accounted)?);
        }
        let at = |v6: bool| -> Option<SocketAddr> {
            let mut addresses = listeners.iter().filter_map(Listener::tcp_addr);
            addresses.find(|address| address.is_ipv6() == v6)
        };
        let Some(Listener::Tcp(first)) = listeners.first() else {
            anyhow::bail!("the helper sent no socket");
        };
        let cookie = netns::cookie(first)?;
        let (v4, v6) = (at(false), at(true));
        self.redirect
            .set_marked_listener(LISTENER, first, v4, v6, self.mark)?;
        let stop = self.stop.child_token();
        for listener in listeners {
            let serving = (self.serve)(listener, stop.clone());
            self.serving.push(serving);
        }
        tracing::info!(namespace = opened.name, "network namespace captured");
        let held = Held {
            name: opened.name,
            cookie,
            v4,
            has_v6: v6.is_some(),
            v6_refused: None,
            stop,
        };
        self.held.insert(opened.id, held);
        Ok(())
    }

    /// Like [`Self::open`], for a namespace that got IPv6 after it was opened. Its IPv4 listener is unaffected.
    fn add_v6(&mut self, id: u64, socket: OwnedFd) -> anyhow::Result<()> {
        let Some(held) = self.held.get_mut(&id) else {
            return Ok(()); // The namespace has been closed meanwhile.
        };
        let accounted = |socket: BorrowedFd<'_>| self.accounts.listening(&socket);
        let listener = Listener::adopt(socket, accounted)?;
        let Listener::Tcp(socket) = &listener else {
            anyhow::bail!("the helper sent a socket of another kind");
        };
        let v6 = listener.tcp_addr();
        self.redirect
            .set_marked_listener(LISTENER, socket, held.v4, v6, self.mark)?;
        held.has_v6 = true;
        let serving = (self.serve)(listener, held.stop.clone());
        self.serving.push(serving);
        tracing::info!(
            namespace = held.name,
            "network namespace captured over IPv6, too"
        );
        Ok(())
    }

    /// Tells the kernel first and closes the listeners afterwards; open connections go on.
    fn close(&mut self, id: u64) {
        let Some(held) = self.held.remove(&id) else {
            return;
        };
        if let Err(error) = self.redirect.remove_listener(held.cookie, LISTENER) {
            tracing::debug!(%error, "a listener of a namespace that is gone is still noted");
        }
        held.stop.cancel();
        tracing::info!(namespace = held.name, "network namespace gone");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Limit (redirect): Captured network namespaces besides the own one | 256; more are logged
    #[test]
    fn skipped_namespaces_are_logged_only_when_skipping_begins_and_ends() {
        let mut left_out = LeftOut::default();
        for (over, is_cut, said) in [
            (0, false, vec![]),
            (3, false, vec![Notice::Over]),
            (4, false, vec![]),
            (4, true, vec![Notice::Cut]),
            (4, true, vec![]),
            (0, true, vec![Notice::NoneOver]),
            (0, false, vec![Notice::Whole]),
            (1, true, vec![Notice::Over, Notice::Cut]),
            (0, false, vec![Notice::NoneOver, Notice::Whole]),
        ] {
            let look = Look {
                over,
                is_cut,
                ..Look::default()
            };
            assert_eq!(left_out.changed_by(&look), said, "{look:?}");
        }
    }
}
