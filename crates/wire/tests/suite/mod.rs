//! What is promised, whatever carries it. Every binary that includes this runs the same behaviours over its own ways.

pub(crate) mod bounds;
pub(crate) mod driven;
pub(crate) mod end;
pub(crate) mod ends;
pub(crate) mod frames;
pub(crate) mod pulls;
pub(crate) mod puts;

/// Makes a test of each behaviour. `$run` calls it with each way that there is.
macro_rules! conformance {
    ($run:path) => {
        $crate::suite::conformance! {
            $run: puts:
            strided_pieces_land_where_they_belong_and_nowhere_else
            a_large_run_and_many_small_ones_arrive_whole
            one_byte_odd_lengths_and_odd_addresses_arrive_exactly
            what_moves_nothing_ends_well
            prepared_parts_move_for_the_slots_of_each_transfer
            many_small_transfers_end_once_each_failures_among_them
        }
        $crate::suite::conformance! {
            $run: pulls:
            pulled_pieces_land_where_they_belong_and_nowhere_else
            pulls_of_all_sizes_arrive_and_a_bad_one_is_refused
            once_a_pull_is_cancelled_not_a_byte_changes
        }
        $crate::suite::conformance! {
            $run: frames:
            frames_arrive_in_order_with_their_epoch_up_to_the_limit
            frames_of_all_sizes_keep_their_order_both_ways
            a_frame_for_an_earlier_life_is_dropped_and_named
            a_frame_behind_a_transfer_finds_its_bytes
        }
        $crate::suite::conformance! {
            $run: driven:
            whoever_polls_or_waits_gets_what_it_waits_for
        }
        $crate::suite::conformance! {
            $run: bounds:
            nothing_is_posted_of_a_transfer_that_leaves_a_region
            a_claimed_region_that_cannot_be_is_refused
            a_region_that_was_given_up_is_refused_by_name_or_left_to_the_transport
        }
        $crate::suite::conformance! {
            $run: ends:
            a_closed_endpoint_ends_its_transfers_and_takes_no_more
            a_worker_that_stops_has_sent_its_frames
            once_a_cancel_is_said_to_be_over_not_a_byte_changes
            a_cancel_ends_the_transfer_that_it_names_and_no_other
            what_its_target_has_revoked_changes_not_a_byte_more
        }
    };
    ($run:path: $module:ident: $($behaviour:ident)*) => { $(
        #[test]
        fn $behaviour() {
            $run($crate::suite::$module::$behaviour);
        }
    )* };
}

pub(crate) use conformance;
