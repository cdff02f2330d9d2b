//! Looks after a redirect while it is there: its counts, who is exempt, the cgroup.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::redirect_view::RedirectView;
use crate::config::plan::OnFailure;
use crate::ebpf::object::KernelError;
use crate::ebpf::redirect::Redirect;
use crate::telemetry::AditMetrics;

/// How often counts of the kernel are read, ended processes forgotten, and the cgroup looked after.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Brings the kernel's counts to the metrics, forgets processes that ended, and says when the cgroup is gone: its programs went
/// with it.
pub(super) async fn look_after(
    redirect: Arc<Redirect>,
    on_failure: OnFailure,
    cgroup: PathBuf,
    metrics: AditMetrics,
    view: Arc<RedirectView>,
    stop: CancellationToken,
) {
    let mut there = true;
    let mut told = false;
    loop {
        if let Ok(calls) = redirect.calls() {
            for (outcome, count) in calls {
                metrics.redirect().set_calls(outcome, count);
            }
        }
        let forgetting = Arc::clone(&redirect);
        let forgotten = tokio::task::spawn_blocking(move || forgetting.forget_ended()).await;
        match forgotten {
            Ok(Ok(_count)) => (),
            Ok(Err(error)) if !told => {
                told = true;
                not_forgotten(on_failure, &error);
            }
            Ok(Err(_again)) => (),
            Err(_panicked) => return, // Or the runtime shuts down.
        }
        if there && !is_there(&cgroup) {
            there = false;
            view.missing(&format!("the cgroup {} was removed", cgroup.display()));
            tracing::warn!(cgroup = %cgroup.display(), "the captured cgroup was removed: nothing is redirected until a restart");
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(LOOK_EVERY) => (),
        }
    }
}

/// Says that exemptions outlive their processes: a stranger may go direct, which matters where nothing else does.
fn not_forgotten(on_failure: OnFailure, error: &KernelError) {
    match on_failure {
        OnFailure::Open => {
            tracing::debug!(%error, "exempt processes are not forgotten when they end")
        }
        OnFailure::Closed => tracing::warn!(
            %error,
            "exempt processes are not forgotten when they end: one that later gets the id of an agent goes direct, \
             --redirect-on-failure=closed or not"
        ),
    }
}

fn is_there(cgroup: &Path) -> bool {
    cgroup.join("cgroup.procs").exists()
}
