//! Maintains an active redirect: its counters, exempt processes and the cgroup.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::process::Process;
use crate::redirect_view::RedirectView;
use crate::status::model::RedirectOthers;
use adit_config::plan::OnFailure;
use adit_host::blocking;
use adit_host::cgroup::{PART_OF_HOST, WHOLE_HOST, is_part_of_host};
use adit_redirect::object::KernelError;
use adit_redirect::redirect::Redirect;
use adit_telemetry::AditMetrics;

/// Interval between two rounds of maintenance: kernel counters, ended processes, the cgroup.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Most other programs that are listed one by one.
const OTHERS_NAMED: usize = 16;

/// Records that programs are attached with this number of rules, and warns if the cgroup is only a part of the host.
pub(crate) fn log_active(cgroup: &Path, rules: usize, view: &RedirectView) {
    view.active(cgroup, rules);
    if is_part_of_host(cgroup) {
        view.part_of_host();
        let cgroup = cgroup.display();
        tracing::warn!(%cgroup, remedy = WHOLE_HOST, "the captured cgroup is {PART_OF_HOST}");
    }
}

/// Reports other programs, and maintains the redirect until `stop`. To be called last: it examines many cgroups, and captured
/// connections would wait for it.
pub(crate) fn maintain(
    process: &Process,
    redirect: &Arc<Redirect>,
    on_failure: OnFailure,
    cgroup: &Path,
    stop: &CancellationToken,
) {
    log_other_programs(redirect, cgroup, &process.redirect);
    let supervision = supervise(
        Arc::clone(redirect),
        on_failure,
        cgroup.to_owned(),
        process.metrics.clone(),
        Arc::clone(&process.redirect),
        stop.clone(),
    );
    process.services.spawn_always("redirect", supervision);
}

/// Logs which programs of other owners currently run when captured processes connect.
fn log_other_programs(redirect: &Redirect, cgroup: &Path, view: &RedirectView) {
    let others = match redirect.other_programs(cgroup) {
        Ok(found) => {
            let unknown = found.unknown();
            let programs = found.programs.iter().take(OTHERS_NAMED);
            RedirectOthers {
                count: found.programs.len() as u64,
                programs: programs.map(ToString::to_string).collect(),
                unknown,
            }
        }
        Err(error) => RedirectOthers {
            unknown: Some(format!("the kernel does not list them: {error}")),
            ..RedirectOthers::default()
        },
    };
    let unknown = others.unknown.as_deref();
    if others.count > 0 {
        tracing::info!(
            count = others.count,
            others = others.programs.join(", "),
            unknown,
            "other eBPF programs run when captured processes connect; the redirect rules see destinations as the programs before \
             Adit's changed them"
        );
    } else if let Some(unknown) = unknown {
        tracing::info!(
            unknown,
            "cannot list other eBPF programs that run when captured processes connect: run `bpftool cgroup tree` as root"
        );
    }
    view.others(others);
}

/// Copies kernel counters to the metrics, forgets exempt processes that ended, and reports a removed cgroup, whose programs are
/// gone with it.
async fn supervise(
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
        match blocking::run(move || forgetting.forget_ended()).await {
            Ok(Ok(_count)) => (),
            Ok(Err(error)) if !told => {
                told = true;
                not_forgotten(on_failure, &error);
            }
            Ok(Err(_again)) => (),
            Err(error) => {
                tracing::warn!(%error, "cannot look for exempt processes that have ended")
            }
        }
        if there && !redirect.is_on(&cgroup) {
            there = false;
            view.missing(&format!(
                "the cgroup {} was removed or recreated, and its eBPF programs are detached",
                cgroup.display()
            ));
            gone(on_failure, &cgroup);
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(LOOK_EVERY) => (),
        }
    }
}

/// Logs that exemptions outlive their processes: a process that reuses an exempt id connects directly, even with `closed`.
fn not_forgotten(on_failure: OnFailure, error: &KernelError) {
    match on_failure {
        OnFailure::Open => {
            tracing::debug!(%error, "cannot track the end of exempt processes")
        }
        OnFailure::Closed => tracing::warn!(
            %error,
            "cannot track the end of exempt processes: a new process that reuses the id of an ended agent goes direct, \
             even with --redirect-on-failure=closed"
        ),
    }
}

fn gone(on_failure: OnFailure, cgroup: &Path) {
    let cgroup = cgroup.display();
    match on_failure {
        OnFailure::Open => tracing::warn!(
            %cgroup,
            "the captured cgroup was removed or recreated: its processes connect directly until this process restarts"
        ),
        OnFailure::Closed => tracing::error!(
            %cgroup,
            "the captured cgroup was removed or recreated: its processes connect directly until this process restarts"
        ),
    }
}
