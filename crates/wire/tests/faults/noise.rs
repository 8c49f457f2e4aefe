//! Everything at once.

use kvferry_fake_ucx::{Fault, Noise, Script};
use kvferry_wire::{ContextOptions, Event, PutError, Route, Status, TransferId};

use super::{STALL, Stage, play, way};
use crate::suite::end::{Way, bytes, filled, pattern, side_by_side};

const FAULTS: &[Fault] = &[
    Fault::Double,
    Fault::Overtaken,
    Fault::Delay(3),
    Fault::Delay(60),
    Fault::Fail(Status::ERR_IO_ERROR),
    Fault::Lose,
    Fault::Break(Status::ERR_CONNECTION_RESET),
];

const TRANSFERS: u64 = 60;
const EACH: u64 = 3000;

/// Each transfer has a place of its own, so what ends well is whole, whatever happened to the others.
pub(crate) fn noise_of_every_kind_loses_transfers_and_never_bytes() {
    let routes = [Route::Direct, Route::Landing, Route::Staged, Route::Runs];
    // By messages only, and with rings, out of whose order the script then takes some.
    for (route, ring_bytes) in routes.into_iter().flat_map(|route| [(route, 0), (route, 16 << 10)]) {
        let (mut well, mut badly) = (0, 0);
        for seed in 0..12 {
            // From rare faults to frequent ones. A lost message costs the stall deadline, and so do frequent ones.
            let noise = Noise { seed, one_in: 200 >> (seed % 4), faults: FAULTS };
            let _session = play(Script { noise: Some(noise), ..Script::default() });
            let way = way(route, STALL);
            let stage = Stage::over(&Way { options: ContextOptions { ring_bytes, ..way.options.clone() }, ..way });
            let sent = pattern(TRANSFERS * EACH);
            let source = filled(&stage.a.context, &sent);
            let target = stage.b.context.allocate(TRANSFERS * EACH).unwrap();
            let remote = stage.a.worker.import(stage.a.to_peer, &target.card()).unwrap();
            for transfer in 0..TRANSFERS {
                let base = transfer * EACH;
                stage.a.put(transfer, side_by_side((&source, base), (remote, base), EACH / 10, 10));
                if transfer % 9 == 4 {
                    stage.a.worker.cancel(TransferId(transfer)).unwrap();
                }
            }
            let mut ended = vec![0; TRANSFERS as usize];
            for _ in 0..TRANSFERS {
                let (TransferId(transfer), result) = stage.a.ended();
                let place = (transfer * EACH) as usize..((transfer + 1) * EACH) as usize;
                ended[transfer as usize] += 1;
                match result {
                    Ok(_) => {
                        well += 1;
                        assert!(
                            bytes(&target)[place.clone()] == sent[place],
                            "{route}, seed {seed}, transfer {transfer}"
                        );
                    }
                    Err(PutError::Cancelled) => assert_eq!(transfer % 9, 4, "{route}, seed {seed}"),
                    Err(_) => badly += 1,
                }
            }
            assert_eq!(ended, vec![1; TRANSFERS as usize], "{route}, seed {seed}");
            // Nothing else is said of a transfer, ever.
            let more = stage.a.events.try_iter().any(|event| matches!(event, Event::TransferDone { .. }));
            assert!(!more, "{route}, seed {seed}");
        }
        println!("{route}, rings of {ring_bytes} B: {well} well, {badly} badly");
        // What is copied into mapped memory, or taken through a ring, meets few of the faults.
        let spared = route == Route::Direct || (route != Route::Runs && ring_bytes > 0);
        assert!(well > 0 && (badly > 0 || spared), "{route}: {well} well, {badly} badly");
    }
}
